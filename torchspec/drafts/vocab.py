"""Reduced draft vocabularies: the most frequent tokens of the training text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchspec.errors import ConfigError


def build_d2t(counts: Tensor, size: int, keep: Iterable[int] = ()) -> Tensor:
    """Choose a draft vocabulary: `keep`, then the most frequent tokens, ties to the lower id.

    Draft ids follow the order of the policy's ids.

    Args:
        counts: integers [V], how often each token occurs in the training text.
        size: tokens of the draft vocabulary.
        keep: ids that must be in it: the end tokens and other special tokens of the chat template.

    Returns:
        d2t, int64 [size]: policy id minus draft id, the offsets vLLM reads from the checkpoint.

    Raises:
        ConfigError: `size` does not lie between the number of kept ids and V.

    Example:
        build_d2t(torch.tensor([5, 0, 7, 5, 1]), size=3, keep=[4])    # ids 0, 2, 4 -> tensor([0, 1, 2])
    """
    kept = sorted(set(keep))
    if not len(kept) <= size <= len(counts):
        raise ConfigError(
            f"draft.vocab_size = {size} is not allowed; it must be between {len(kept)}, the special tokens, "
            f"and {len(counts)}, the policy's vocabulary"
        )
    ranked = torch.argsort(counts, descending=True, stable=True)
    frequent = ranked[~torch.isin(ranked, torch.tensor(kept, dtype=torch.int64))]
    ids = torch.cat([torch.tensor(kept, dtype=torch.int64), frequent[: size - len(kept)].cpu()])
    return ids.sort().values - torch.arange(size)


def target_ids(d2t: Tensor) -> Tensor:
    """The policy's id of each draft id, int64 [draft vocabulary]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def build_t2d(d2t: Tensor, vocab_size: int) -> Tensor:
    """Which of the policy's tokens the draft can propose, bool [V]."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=d2t.device)
    t2d[target_ids(d2t)] = True
    return t2d
