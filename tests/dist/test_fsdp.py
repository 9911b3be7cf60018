"""FSDP2 over two gloo ranks against one unsharded run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.dist.worlds import run_world
from torchspec.checkpoint.export import export_policy
from torchspec.config.schema import Config, TinyModel
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_policy
from torchspec.models import hf
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Batch, SamplingLaw

pytestmark = pytest.mark.dist
LENGTHS = [11, 5, 20, 8]


def pack(lengths: list[int], vocab: int, seed: int, masked: bool = False) -> Batch:
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(0, vocab, (total,), generator=g)
    ends = torch.tensor(lengths).cumsum(0)
    mask = torch.rand(total, generator=g) > 1 / 3
    mask[ends - 1] = False
    if masked:
        mask[:] = False
    return Batch(
        tokens=tokens,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        targets=tokens.roll(-1),
        target_mask=mask,
        rollout_logprobs=torch.zeros(total),
        advantages=torch.zeros(total),
        chain=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
    )


def backward(policy: Policy, batches: list[Batch], global_tokens: float) -> None:
    for batch in batches:
        out = policy(batch, law=SamplingLaw(temperature=0.7), logprob_rows=6, aux_layers=(1,))
        policy.head_weight()  # a draft's teacher: must not disturb the backward that follows
        (-out.logprobs.sum() / global_tokens).backward()


def full_gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in policy.named_parameters()}


def spec(arch: str, tied: bool) -> PolicySpec:
    return PolicySpec(
        arch=arch,
        vocab_size=37,  # odd sizes: shards of unequal length
        dim=24,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=6,
        ffn_dim=33,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tied=tied,
        max_len=32,
    )


def compare_gradients(mesh: Mesh) -> None:
    cases = [("qwen3", True, False), ("qwen3", False, True), ("llama3", True, True), ("llama3", False, False)]
    for arch, tied, recompute in cases:
        for masked in (False, True):  # masked: nothing to learn on rank 1
            batches = [
                pack(LENGTHS[:2], 37, 0),
                pack(LENGTHS[2:], 37, 1, masked),
                pack([9], 37, 2),
                pack([30], 37, 3),
            ]
            tokens = float(sum(int(b.target_mask.sum()) for b in batches))
            single = Policy(spec(arch, tied))
            single.init_weights(7)
            single.double()
            backward(single, batches, tokens)
            want = {name: p.grad for name, p in single.named_parameters()}

            policy = Policy(spec(arch, tied), activation_checkpointing=recompute)
            policy.init_weights(7)
            policy.double()
            shard(policy, policy.layers, mesh, torch.float64)
            backward(policy, batches[mesh.dp_rank :: 2], tokens)
            torch.testing.assert_close(full_gradients(policy), want, rtol=1e-10, atol=1e-12)


def test_gradients_are_the_sum_over_ranks(tmp_path: Path) -> None:
    run_world(2, compare_gradients, tmp_path)


def train_and_export(mesh: Mesh, source: Path, target: Path) -> dict[str, Tensor]:
    """A few checks along one optimizer step in mixed precision."""
    shape = PolicySpec.from_hf(source)
    config = Config()
    config.model.dtype, config.train.activation_checkpointing = "bfloat16", True
    policy = load_policy(source, shape, mesh, config)
    plain = Policy(shape)
    hf.load_hf(plain, source)

    loaded = dict(policy.hf_weights())
    assert loaded.keys() == dict(plain.hf_weights()).keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in plain.hf_weights())
    assert torch.equal(policy.head_weight(), plain.head_weight())
    assert policy.head_weight(torch.bfloat16).dtype == torch.bfloat16

    batches = [pack(LENGTHS[:2], 99, 0), pack(LENGTHS[2:], 99, 1)]
    tokens = float(sum(int(b.target_mask.sum()) for b in batches))
    backward(policy, [batches[mesh.dp_rank]], tokens)
    backward(plain, batches, tokens)
    for (name, p), q in zip(policy.named_parameters(), plain.parameters(), strict=True):
        got = p.grad.full_tensor()
        assert got.dtype == p.dtype == torch.float32
        assert torch.linalg.norm(got - q.grad) <= 0.05 * torch.linalg.norm(q.grad) + 1e-6, name

    torch.optim.SGD(policy.parameters(), lr=1.0).step()
    with torch.no_grad():  # a forward without backward must not leave gathered copies behind
        policy(batches[0], law=SamplingLaw(temperature=1.0), logprob_rows=6)
    stepped = dict(policy.hf_weights())
    torch.optim.SGD(policy.parameters(), lr=1.0).step()
    assert not torch.equal(dict(policy.hf_weights())["model.norm.weight"], stepped["model.norm.weight"])
    export_policy(policy, target, source, mesh)
    assert (target / "model.safetensors").is_file()  # on every rank, once export returns
    return dict(policy.hf_weights())


def train_and_export_all(mesh: Mesh, folder: Path) -> list[dict[str, Tensor]]:
    return [train_and_export(mesh, folder / f"source{i}", folder / f"target{i}") for i in range(2)]


def test_load_step_and_export(tmp_path: Path) -> None:
    for i, tied in enumerate((True, False)):
        tiny = TinyModel(dim=24, layers=2, heads=2, kv_heads=1, head_dim=12, ffn_dim=41, tied=tied)
        make_tiny(tmp_path / f"source{i}", tiny, 32, seed=3)
    for result in run_world(2, train_and_export_all, tmp_path, tmp_path):
        for i, weights in enumerate(result):
            again = Policy(PolicySpec.from_hf(tmp_path / f"target{i}"))
            hf.load_hf(again, tmp_path / f"target{i}")
            assert all(torch.equal(weights[name], weight) for name, weight in again.hf_weights())
