"""Problems, prompts, and packs of rollouts."""

from torchspec.data.problems import load_problems
from torchspec.data.prompts import encode_prompts

__all__ = ["encode_prompts", "load_problems"]
