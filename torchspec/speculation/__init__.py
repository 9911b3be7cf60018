"""Who drafts how many tokens: drafters without a model, budgets, and what was measured."""
