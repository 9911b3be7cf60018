"""The suffix drafter."""
