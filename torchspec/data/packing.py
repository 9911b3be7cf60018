"""Packing: rollouts become Batches of whole documents, evenly filled.

Longest-processing-time packing: documents, longest first, each go to the pack with the fewest tokens. For a
fixed order of documents one more pack never makes any pack fuller, so a number of packs that keeps
`pack_tokens` keeps it for every larger number too; ranks can agree on the largest number any of them needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from torchspec.records import Batch, Rollout


def make_batch(rollouts: Sequence[Rollout]) -> Batch:
    """One pack of `rollouts`, in their order; the layout is documented at `records.Batch`.

    Raises:
        ValueError: a rollout without a prompt, or with another number of logprobs than tokens.
    """
    tokens: list[int] = []
    positions: list[int] = []
    chain: list[int] = []
    targets: list[int] = []
    target_mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    ends = [0]
    for r in rollouts:
        before, response = len(r.prompt_tokens), len(r.tokens)
        if before == 0 or len(r.logprobs) != response:
            raise ValueError(
                f"rollout {r.sample} of {r.problem_id}: {before} prompt tokens, {response} tokens, "
                f"{len(r.logprobs)} logprobs; a prompt and one logprob a token are needed"
            )
        document = r.prompt_tokens + r.tokens
        # Row i predicts token i + 1: the response's rows start at the prompt's last token, and end one early.
        head, tail = before - 1, 1
        tokens += document
        positions += range(len(document))
        # A draft follows a sampled token: row i's chain starts behind token i + 1, which is one from row head on.
        chain += [0] * head + [max(0, len(document) - i - 2) for i in range(head, len(document))]
        targets += [*document[1:], 0]
        target_mask += [False] * head + [r.train] * response + [False] * tail
        logprobs += [0.0] * head + r.logprobs + [0.0] * tail
        advantages += [0.0] * head + [r.advantage] * response + [0.0] * tail
        ends.append(ends[-1] + len(document))
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        target_mask=torch.tensor(target_mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        chain=torch.tensor(chain, dtype=torch.int64),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
    )


def _nothing() -> Rollout:
    """What fills a pack that got no document: one token, which nothing is trained on."""
    return Rollout(
        problem_id="",
        sample=0,
        prompt_tokens=[0],
        tokens=[],
        logprobs=[],
        finish="stop",
        policy_version=0,
        draft_version=0,
    )


def num_packs_needed(lengths: Sequence[int], pack_tokens: int) -> int:
    """The fewest packs `pack` can fill such that only a single document exceeds `pack_tokens`."""
    num_packs = -(-sum(min(n, pack_tokens) for n in lengths) // pack_tokens)
    while True:
        packs = _assign(lengths, num_packs)
        if all(len(pack) == 1 or sum(lengths[i] for i in pack) <= pack_tokens for pack in packs):
            return num_packs
        num_packs += 1


def pack(rollouts: Sequence[Rollout], pack_tokens: int, num_packs: int | None = None) -> list[Batch]:
    """Distribute `rollouts` over packs of at most `pack_tokens` tokens, evenly and deterministically.

    A document is never cut: one longer than `pack_tokens` is a pack of its own. With `num_packs`, exactly
    that many batches come back, because all ranks must run the same number of forward passes; packs that
    get no document hold one masked token.

    Raises:
        ValueError: `num_packs` are too few for `pack_tokens`.
    """
    lengths = [len(r.prompt_tokens) + len(r.tokens) for r in rollouts]
    needed = num_packs_needed(lengths, pack_tokens)
    num_packs = needed if num_packs is None else num_packs
    if num_packs < needed:
        raise ValueError(
            f"{num_packs} packs of {pack_tokens} tokens cannot hold {sum(lengths)}; {needed} can"
        )
    return [make_batch([rollouts[i] for i in ids] or [_nothing()]) for ids in _assign(lengths, num_packs)]


def _assign(lengths: Sequence[int], num_packs: int) -> list[list[int]]:
    """Indices of the documents of each pack."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    fill = [(0, p) for p in range(num_packs)]  # a heap of (tokens, pack)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, p = fill[0]
        packs[p].append(i)
        heapq.heapreplace(fill, (tokens + lengths[i], p))
    return [sorted(ids) for ids in packs]


def minibatches(rollouts: Sequence[Rollout], n: int) -> list[list[Rollout]]:
    """Split `rollouts` into `n` parts of whole groups, in order; the parts differ by at most one group.

    Raises:
        ValueError: fewer groups than parts.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.problem_id, []).append(rollout)
    if len(groups) < n:
        raise ValueError(f"rl.minibatches = {n}, but a rank has {len(groups)} problems a step; lower it")
    parts: list[list[Rollout]] = [[] for _ in range(n)]
    for i, group in enumerate(groups.values()):
        parts[i * n // len(groups)] += group
    return parts
