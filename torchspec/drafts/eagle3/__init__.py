"""EAGLE-3 and EAGLE-3.1."""
