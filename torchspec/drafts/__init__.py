"""Draft models: what general code needs of one, and the architectures."""
