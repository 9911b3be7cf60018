"""Each patch is still needed by the vLLM that is installed, and takes. When a probe finds nothing, drop its patch."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from torchspec.rollout.vllm.cpu_patches import PATCHES, apply_patches
from torchspec.rollout.vllm.setup import prepare_environment

pytestmark = pytest.mark.e2e

PROBE = """
import json
from torchspec.rollout.vllm.setup import prepare_environment
from torchspec.rollout.vllm.cpu_patches import PATCHES, apply_patches
prepare_environment("cpu")
pristine = {entry.name: entry.is_needed() for entry in PATCHES}
first, second = apply_patches(), apply_patches()
print(json.dumps([pristine, first, second, {entry.name: entry.is_needed() for entry in PATCHES}]))
"""


def test_every_patch_is_needed_and_takes():
    done = subprocess.run(  # a process of its own: here another test may have patched vLLM already
        [sys.executable, "-c", PROBE],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pristine, first, second, patched = json.loads(done.stdout.splitlines()[-1])
    names = [entry.name for entry in PATCHES]
    assert pristine == dict.fromkeys(names, True)
    assert first == names
    assert second == []
    assert patched == dict.fromkeys(names, False)


@pytest.fixture(scope="module")
def sampling():
    """vLLM's module for the rejection test, patched."""
    prepare_environment("cpu")
    apply_patches()
    from vllm.v1.sample import rejection_sampler

    return rejection_sampler


def p_value(counts: np.ndarray, chances: np.ndarray) -> float:
    expected = chances * counts.sum()
    assert not counts[expected == 0].any()
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = torch.tensor((kept.sum() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("by_model", [False, True])
def test_the_rejection_test_keeps_the_policys_law(sampling, by_model, seeded):
    """Requests with drafts of 2, 0 and 1 tokens, many times over: each token has the policy's law there."""
    torch.manual_seed(3)
    copies, vocabulary, drafts = 30_000, 6, [2, 0, 1]
    logits = torch.randn(3, vocabulary) * 2
    logits[0, 4] = -torch.inf  # as top-k leaves it
    q = torch.randn(3, vocabulary).softmax(-1)
    proposed = torch.stack([torch.multinomial(row, copies, replacement=True) for row in q], 1)
    if not by_model:
        proposed[:] = torch.tensor([1, 2, 3])
    tokens, counts = proposed.int().flatten(), torch.tensor(drafts * copies)
    generators = {i: torch.Generator().manual_seed(i) for i in range(3 * copies)} if seeded else {}
    settings = types.SimpleNamespace(all_random=True, generators=generators)
    out = sampling.rejection_sample(
        tokens, counts.tolist(), 2, counts.cumsum(0).int(), q.repeat(copies, 1) if by_model else None,
        logits.repeat(copies, 1), torch.full((3 * copies, 1), 99), settings,
    ).view(copies, 3, 3).numpy()  # fmt: skip
    law = logits.softmax(-1).double().numpy()
    laws = {(0, 0): law[0], (0, 1): law[1], (2, 0): law[2]}
    for (request, position), chances in laws.items():
        found = out[:, request, position]
        assert p_value(np.bincount(found[found >= 0], minlength=vocabulary), chances) > 0.001, (
            request,
            position,
        )
    assert (out[:, 1] == [99, -1, -1]).all()
    # Behind a rejected token is nothing, behind an accepted one the next, and the bonus token behind them all.
    first, second = out[:, 0, 0] == proposed[:, 0].numpy(), out[:, 0, 1] == proposed[:, 1].numpy()
    assert (out[~first, 0, 1:] == -1).all()
    assert (out[first & ~second, 0, 2] == -1).all()
    accepted = np.minimum(law, q.numpy()).sum(1) if by_model else law[[0, 1, 2], [1, 2, 3]]
    assert abs((out[:, 2, 1] == 99).mean() - accepted[2]) < 0.02


@pytest.mark.parametrize("by_model", [False, True])
def test_a_placeholder_is_rejected(sampling, by_model):
    """vLLM pads drafts with -1: the token there is the policy's own, and nothing follows it."""
    torch.manual_seed(4)
    copies, logits = 20_000, torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 1.0, 0.0]] * 2)
    settings = types.SimpleNamespace(all_random=True, generators={})
    out = sampling.rejection_sample(
        torch.tensor([-1, 1] * copies, dtype=torch.int32), [2] * copies, 2, 2 * torch.arange(1, copies + 1),
        q.repeat(copies, 1) if by_model else None, logits.repeat(copies, 1), torch.full((copies, 1), 99), settings,
    )  # fmt: skip
    found = np.bincount(out[:, 0].numpy(), minlength=3)
    assert p_value(found, logits[0].softmax(-1).double().numpy()) > 0.001
    assert (out[:, 1:] == -1).all()


def test_a_token_that_its_distribution_cannot_draw_is_rejected(sampling):
    """As in vLLM's kernel: q(x) = 0 accepts nothing, however likely the policy finds x."""
    settings = types.SimpleNamespace(all_random=True, generators={})
    out = sampling.rejection_sample(
        torch.tensor([0], dtype=torch.int32), [1], 1, torch.tensor([1]), torch.tensor([[0.0, 0.5, 0.5]]),
        torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[99]]), settings,
    )  # fmt: skip
    assert out.tolist() == [[0, -1]]  # drawn from what p has more than q; the bonus token is not reached


def test_logprobs_are_those_of_the_padded_computation(sampling):
    """Against every position computed: draft rows and bonus rows, ragged, some rejected."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    torch.manual_seed(0)
    metadata = SpecDecodeMetadata.make_dummy([[5, 6, 7], [], [8]], torch.device("cpu"))
    target, bonus = torch.randn(4, 10), torch.randn(3, 10)
    sampled = torch.tensor([[5, 2, -1, -1], [3, -1, -1, -1], [8, 9, -1, -1]], dtype=torch.int32)
    sampler = types.SimpleNamespace(
        is_logits_logprobs_mode=False,
        sampler=types.SimpleNamespace(
            compute_logprobs=Sampler.compute_logprobs, gather_logprobs=Sampler.gather_logprobs
        ),
    )
    with torch.compiler.set_stance("force_eager"):
        found = sampling.RejectionSampler._get_logprobs_tensors(
            sampler, 2, metadata, torch.zeros(7, 10), target, bonus, sampled
        )
    rows = {0: target[0], 1: target[1], 4: bonus[1], 8: target[3], 9: bonus[2]}
    assert len(found.logprobs) == sampled.numel()
    for place, row in rows.items():
        token = int(sampled.flatten()[place])
        law = row.log_softmax(-1)
        best = law.topk(2)
        assert found.logprob_token_ids[place].tolist() == [token, *best.indices.tolist()]
        torch.testing.assert_close(found.logprobs[place], torch.cat([law[[token]], best.values]))
        assert found.selected_token_ranks[place] == (law >= law[token]).sum()
