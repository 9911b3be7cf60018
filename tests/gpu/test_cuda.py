"""The CUDA paths against the oracles, on one GPU; skipped where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchspec.attention import branch_attention, core, reference
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import build_plan
from torchspec.config.schema import Parallel
from torchspec.data.packing import make_batch
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.base import FSDP_METHODS
from torchspec.drafts.eagle3.blocks import TrainingTimeTest
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.eagle3.spec import Eagle3Spec
from torchspec.drafts.trainer import DraftTrainer
from torchspec.metrics.stopwatch import Stopwatch
from torchspec.records import Rollout, Taps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_branch_attention_in_bf16_is_within_a_few_casts_of_the_oracle(entries) -> None:
    draw = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, cu = 8, 2, 64, torch.tensor([0, 1, 70, 300], dtype=torch.int32)

    def tensor(h: int) -> torch.Tensor:
        x = torch.randn(300, h, dim, generator=draw).to("cuda", torch.bfloat16)
        return x.requires_grad_()

    q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
    branch_k, branch_v = ([tensor(kv_heads) for _ in range(entries)] for _ in range(2))
    inputs = [q, k, v, *branch_k, *branch_v]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(300, heads, dim, generator=draw).cuda()
    out, _ = branch_attention(q, k, v, branch_k, branch_v, cu)
    out.backward(grad.bfloat16())
    expected, _ = reference.branch_attention(*exact[:3], exact[3 : 3 + entries], exact[3 + entries :], cu)
    expected.backward(grad.bfloat16().double())
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(inputs, exact))]
    for ours, theirs in pairs:
        cast = (theirs.bfloat16().double() - theirs).abs().max()
        assert (ours.double() - theirs).abs().max() <= 4 * cast


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_simulated_ranks_in_bf16(size, window) -> None:
    """Every rank's rows against every rank's shard, in ring order, in one process: no messages, all kernels."""
    draw = torch.Generator().manual_seed(1)
    heads, kv_heads, dim, ends = 8, 2, 64, (0, 1, 5, 70, 300)

    def tensor(h: int) -> torch.Tensor:
        return torch.randn(300, h, dim, generator=draw).to("cuda", torch.bfloat16)

    q, k, v, dout = tensor(heads), tensor(kv_heads), tensor(kv_heads), tensor(heads)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = reference.branch_attention(*exact, [], [], torch.tensor(ends), window=window)
    expected.backward(dout.double())
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
    plans = [build_plan(ends, size, rank, window=window) for rank in range(size)]
    index = [torch.from_numpy(plan.index).cuda() for plan in plans]
    for rank, plan in enumerate(plans):
        shards = [(rank - step) % size for step in range(size)]
        grads = {s: [torch.zeros_like(x[index[s]], dtype=dk.dtype) for x in (k, v)] for s in shards}
        sources = [Keys(k[index[s]], v[index[s]], plan.tasks(s), *grads[s]) for s in shards]
        mine = index[rank]
        rows = q[mine].contiguous()
        out[mine], lse = core.attend(rows, sources, [], [], window, dim**-0.5)
        dq[mine], _, _ = core.attend_grads(
            dout[mine].contiguous(), rows, sources, [], [], out[mine], lse, window, dim**-0.5
        )
        for s in shards:
            dk[index[s]] += grads[s][0]
            dv[index[s]] += grads[s][1]
    for ours, theirs in [(out, expected), *zip((dq, dk, dv), (x.grad for x in exact))]:
        cast = (theirs.bfloat16().double() - theirs).abs().max()
        assert (ours.double() - theirs).abs().max() <= 4 * cast


SPEC = Eagle3Spec(
    vocab_size=320,
    draft_vocab_size=320,
    dim=128,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn_dim=256,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_len=1024,
    aux_layers=(1, 2, 3),
    fc_norm=True,
    norm_output=True,
)


def test_a_draft_update_in_bf16_follows_fp32_on_the_cpu() -> None:
    """The whole of TTT under FSDP in mixed precision, in one block and in several."""
    draw = torch.Generator().manual_seed(2)
    lengths = [300, 40, 1, 120]
    documents = [
        Rollout(
            problem_id="",
            sample=0,
            prompt_tokens=[1] * 5,
            tokens=torch.randint(0, 320, (n,), generator=draw).tolist(),
            logprobs=[0.0] * n,
            finish="stop",
            policy_version=0,
            draft_version=0,
        )
        for n in lengths
    ]
    batch = make_batch(documents)
    embeds, *aux, final = torch.randn(5, len(batch.tokens), SPEC.dim, generator=draw)
    taps, head = Taps(embeds=embeds, aux=tuple(aux), final=final), torch.randn(320, 128, generator=draw)

    def draft() -> Eagle3:
        torch.manual_seed(3)
        return Eagle3(SPEC)

    exact, mesh = draft(), Mesh(Parallel(), "cuda")
    objective = TrainingTimeTest(passes=4, pass_decay=0.8, loss_rows=64)
    trainer = DraftTrainer(exact, objective)
    denominator = trainer.denominator(trainer.counts(batch))
    expected = trainer.backward(batch, taps, head, denominator)
    want = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])

    def cuda(x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda", torch.bfloat16)

    taps = Taps(embeds=cuda(embeds), aux=tuple(map(cuda, aux)), final=cuda(final))
    for row_block in (0, 96):
        sharded = draft().cuda()
        shard(sharded, [], mesh, torch.bfloat16, methods=FSDP_METHODS)
        trainer = DraftTrainer(sharded, dataclasses.replace(objective, row_block=row_block))
        stats = trainer.backward(batch.to(mesh.device), taps, cuda(head), denominator)
        assert stats.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)
        found = torch.cat([p.grad.full_tensor().flatten() for p in sharded.parameters()]).cpu()
        assert (found - want).norm() < 0.1 * want.norm()
    mesh.close()


def test_the_stopwatch_times_the_device_not_the_host() -> None:
    watch, x = Stopwatch(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    with watch.time("policy"):
        x @ x
        with watch.time("draft", within="policy"):
            for _ in range(20):
                x @ x
    end.record()
    seconds = watch.read()
    assert seconds["draft"] > 5 * seconds["policy"] > 0
    assert sum(seconds.values()) <= start.elapsed_time(end) / 1e3
