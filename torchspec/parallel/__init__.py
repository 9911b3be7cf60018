"""Sharding of the policy and the draft over ranks."""
