"""Scores and advantages."""

from torchspec.rewards.scorer import Scorer, build_scorer

__all__ = ["Scorer", "build_scorer"]
