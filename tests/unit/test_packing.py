"""Packing against brute force: each row of a pack is recomputed from the definition of row alignment."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspec.data.packing import make_batch, minibatches, num_packs_needed, pack
from torchspec.records import Batch, Rollout


def rollout(prompt: list[int], tokens: list[int], **fields) -> Rollout:
    defaults = dict(
        problem_id="p",
        sample=0,
        logprobs=[-0.125 * (i + 1) for i in range(len(tokens))],
        finish="stop",
        policy_version=0,
        draft_version=0,
    )
    return Rollout(prompt_tokens=prompt, tokens=tokens, **{**defaults, **fields})


@st.composite
def rollout_lists(draw, min_size=1):
    """Rollouts whose tokens are unique over the list, so that a token names its place."""
    count = draw(st.integers(min_size, 12))
    rollouts, fresh = [], iter(range(1, 10_000))
    for i in range(count):
        prompt = [next(fresh) for _ in range(draw(st.integers(1, 6)))]
        tokens = [next(fresh) for _ in range(draw(st.integers(0, 9)))]
        rollouts.append(
            rollout(
                prompt,
                tokens,
                problem_id=f"p{draw(st.integers(0, 3))}",
                sample=i,
                advantage=draw(st.floats(-2, 2, width=32)),
                train=draw(st.booleans()),
            )
        )
    return rollouts


def brute_force_rows(r: Rollout) -> list[tuple]:
    """Per row: token, position, target, mask, logprob, advantage, chain; straight from the definition."""
    document = r.prompt_tokens + r.tokens
    rows = []
    for i, token in enumerate(document):
        target, mask, logprob, advantage = 0, False, 0.0, 0.0
        if i + 1 < len(document):
            target = document[i + 1]
            j = i + 1 - len(r.prompt_tokens)  # the row's target is response token j
            if j >= 0:
                mask, logprob, advantage = r.train, r.logprobs[j], r.advantage
        chain = 0
        # The engine drafts once it has sampled token i + 1; token i + 2 is then the draft's first.
        while len(r.prompt_tokens) <= i + 1 and i + 2 + chain < len(document):
            chain += 1
        rows.append((token, i, target, mask, logprob, advantage, chain))
    return rows


def batch_rows(batch: Batch) -> list[list[tuple]]:
    """The same rows read out of a batch, document by document."""
    columns = (
        batch.tokens,
        batch.positions,
        batch.targets,
        batch.target_mask,
        batch.rollout_logprobs,
        batch.advantages,
        batch.chain,
    )
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    ends = batch.cu_seqlens.tolist()
    assert ends[0] == 0
    assert ends[-1] == len(rows)
    return [rows[a:b] for a, b in pairwise(ends)]


def test_the_documented_example():
    batch = make_batch(
        [
            rollout([7, 8], [9, 2], logprobs=[-1.0, -0.1], advantage=1.0),
            rollout([7], [3, 2], logprobs=[-0.5, -0.2], advantage=-1.0),
        ]
    )
    f, t = False, True
    assert batch.tokens.tolist() == [7, 8, 9, 2, 7, 3, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.targets.tolist() == [8, 9, 2, 0, 3, 2, 0]
    assert batch.target_mask.tolist() == [f, t, t, f, t, t, f]
    assert torch.equal(batch.rollout_logprobs, torch.tensor([0, -1, -0.1, 0, -0.5, -0.2, 0]))
    assert batch.advantages.tolist() == [0, 1, 1, 0, -1, -1, 0]
    assert batch.chain.tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    dtypes = [getattr(batch, name).dtype for name in (*Batch.DEVICE_ROWS, "chain", "cu_seqlens")]
    assert dtypes == [torch.int64] * 3 + [torch.bool] + [torch.float32] * 2 + [torch.int64, torch.int32]


@given(rollout_lists())
def test_make_batch_equals_brute_force(rollouts):
    assert batch_rows(make_batch(rollouts)) == [brute_force_rows(r) for r in rollouts]


def test_untrained_responses_are_masked_but_drafted():
    batch = make_batch([rollout([1, 2], [3, 4], train=False)])
    assert batch.chain.tolist() == [0, 1, 0, 0]
    assert batch.targets.tolist() == [2, 3, 4, 0]
    assert not batch.target_mask.any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rollout([1], [2, 3], logprobs=[-0.5], sample=4), r"rollout 4 of p: .* 2 tokens, 1 logprobs"),
        (rollout([], [2, 3]), "rollout 0 of p: 0 prompt tokens"),
    ],
)
def test_make_batch_refuses(bad, message):
    with pytest.raises(ValueError, match=message):
        make_batch([bad])


@settings(max_examples=200)
@given(rollout_lists(min_size=0), st.integers(1, 40), st.integers(0, 4))
def test_pack_keeps_every_document_whole_and_once(rollouts, pack_tokens, extra):
    lengths = [len(r.prompt_tokens) + len(r.tokens) for r in rollouts]
    num_packs = num_packs_needed(lengths, pack_tokens) + extra
    batches = pack(rollouts, pack_tokens, num_packs)

    assert len(batches) == num_packs
    documents = [(doc, batch) for batch in batches for doc in batch_rows(batch)]
    dummies = [doc for doc, _ in documents if doc == [(0, 0, False, 0, False, 0.0, 0.0)]]
    packed = sorted(doc for doc, _ in documents if doc not in dummies)
    assert packed == sorted(brute_force_rows(r) for r in rollouts)
    assert len(dummies) == max(0, num_packs - len(rollouts))
    for batch in batches:
        assert batch.tokens.numel() <= pack_tokens or len(batch.cu_seqlens) == 2
    assert sum(int(b.target_mask.sum()) for b in batches) == sum(len(r.tokens) for r in rollouts if r.train)


@given(rollout_lists(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_what_the_loss_reads_does_not_depend_on_order_or_pack_size(rollouts, pack_tokens, rng):
    def loss_rows(batches):
        rows = [row for b in batches for doc in batch_rows(b) for row in doc]
        return sorted((target, mask, lp, adv) for _, _, _, target, mask, lp, adv in rows if mask)

    shuffled = rng.sample(rollouts, len(rollouts))
    assert loss_rows(pack(shuffled, pack_tokens)) == loss_rows([make_batch(rollouts)])


def test_pack_is_deterministic():
    rng = random.Random(0)
    rollouts = [rollout([1] * rng.randint(1, 9), [2] * rng.randint(1, 9), sample=i) for i in range(40)]
    first, again = pack(rollouts, 64), pack(rollouts, 64)
    assert [batch_rows(b) for b in first] == [batch_rows(b) for b in again]


def test_oversized_documents_are_packs_of_their_own():
    batches = pack([rollout([1], [2] * 99), rollout([3], [4]), rollout([5], [6])], pack_tokens=10)
    assert sorted(b.tokens.numel() for b in batches) == [4, 100]


def test_too_few_packs_raise():
    with pytest.raises(ValueError, match="1 packs of 4 tokens cannot hold 6; 2 can"):
        pack([rollout([1], [2, 3]), rollout([1], [2, 3])], pack_tokens=4, num_packs=1)


def test_nothing_to_pack():
    assert num_packs_needed([], 8) == 0
    assert pack([], 8) == []
    assert [b.tokens.tolist() for b in pack([], 8, num_packs=2)] == [[0], [0]]


@given(st.lists(st.integers(1, 50), max_size=14), st.integers(1, 60))
def test_a_number_of_packs_that_suffices_stays_sufficient(lengths, pack_tokens):
    """The module's claim that lets ranks agree on the maximum; `pack` would raise no error but overfill."""
    needed = num_packs_needed(lengths, pack_tokens)
    rollouts = [rollout([1] * n, []) for n in lengths]
    for num_packs in range(needed, needed + 5):
        for batch in pack(rollouts, pack_tokens, num_packs):
            assert batch.tokens.numel() <= pack_tokens or len(batch.cu_seqlens) == 2


@pytest.mark.parametrize("seed", range(5))
def test_packs_of_lognormal_lengths_are_balanced(seed, record_property):
    rng = random.Random(seed)
    lengths = [min(int(rng.lognormvariate(5.5, 0.8)) + 1, 4096) for _ in range(256)]
    rollouts = [rollout([1], [2] * (n - 1)) for n in lengths]
    tokens = [b.tokens.numel() for b in pack(rollouts, pack_tokens=8192)]
    imbalance = max(tokens) / (sum(tokens) / len(tokens))
    record_property("max_over_mean_tokens", round(imbalance, 4))
    assert imbalance < 1.01
    assert len(tokens) <= -(-sum(lengths) // 8192) + 1


def test_minibatches_are_whole_groups_in_order():
    rollouts = [rollout([1], [2], problem_id=f"p{i % 5}", sample=i // 5) for i in range(20)]
    parts = minibatches(rollouts, 2)
    assert [sorted({r.problem_id for r in part}) for part in parts] == [["p0", "p1", "p2"], ["p3", "p4"]]
    assert sorted((r.problem_id, r.sample) for part in parts for r in part) == sorted(
        (r.problem_id, r.sample) for r in rollouts
    )


def test_minibatches_need_as_many_groups():
    with pytest.raises(ValueError, match=r"rl.minibatches = 3, but a rank has 1 problems"):
        minibatches([rollout([1], [2])], 3)
