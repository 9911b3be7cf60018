"""Budget rules: how many draft tokens are verified."""
