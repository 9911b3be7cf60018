"""One update of policy and draft, and what surrounds it."""
