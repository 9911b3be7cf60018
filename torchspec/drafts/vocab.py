"""Reduced draft vocabularies: the most frequent tokens of the training text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchspec.errors import ConfigError
from torchspec.models.vocabulary import check_ids


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


def check_maps(d2t: Tensor, t2d: Tensor | None, vocab_size: int, where: object) -> None:
    """Check the vocabulary map of a checkpoint as indices, before it is used as such.

    Args:
        d2t: as in the file, with one entry per draft token.
        t2d: as in the file, or None.
        vocab_size: of the policy.
        where: the file, for messages.

    Raises:
        ConfigError: an id outside of the policy's vocabulary, two draft ids for one token, or two maps that
            disagree.
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool or d2t.dim() != 1:
        raise ConfigError(f"{where}: d2t is {d2t.dtype} {list(d2t.shape)}; a list of integers is needed")
    ids = target_ids(d2t.to(torch.int64))
    remedy = "d2t[i] must be the policy's id of draft token i, less i"
    check_ids(ids.tolist(), vocab_size, f"{where}: d2t", remedy)
    if len(ids.unique()) != len(ids):
        raise ConfigError(f"{where}: d2t leads to the same token from two draft ids; {remedy}")
    if t2d is None:
        return
    if list(t2d.shape) != [vocab_size] or not torch.equal(
        t2d.bool(), build_t2d(d2t.to(torch.int64), vocab_size)
    ):
        raise ConfigError(
            f"{where}: t2d {list(t2d.shape)} does not mark just the tokens that d2t leads to; write both from one list"
        )
