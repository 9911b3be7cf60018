"""Problems, prompts, and packs of rollouts."""

from torchspec.data.problems import encode_prompts, load_problems

__all__ = ["encode_prompts", "load_problems"]
