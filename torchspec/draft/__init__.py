"""Draft models that are trained with the policy."""
