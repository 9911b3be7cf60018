"""What the TapChannel and draft training cost a pipelined step: ratios of step times in one run.

    torchrun --standalone --nproc_per_node=2 benchmarks/pipeline_taps.py
    torchrun --standalone --nproc_per_node=4 benchmarks/pipeline_taps.py --schedule ZBVZeroBubble

Every round runs one step of each mode, in changing order: the policy alone; with taps sent, but no draft trained
on them; with the draft trained on the last stage's rank; and with the draft trained in turns ("spread"). A step is
forward and backward of all microbatches and, where a draft is trained, the sum of its gradients over the pipeline.
Ratios are medians over rounds of the ratio to the policy alone in the same round, so that a load that comes and
goes counts on both sides. The wait is the host's in `TapChannel.take`, on the rank that waits longest, as a share
of the step. Step times need a free core for each rank. CPU times do not: of all ranks together they say what the
work is, of the busiest rank what a step of many microbatches cannot be faster than.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.config.schema import Config, Parallel, TinyModel
from torchspec.data import packing
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_pipelined
from torchspec.distributed.pipeline.policy import PipelinedPolicy, sum_gradients
from torchspec.drafts.build import build_draft, draft_spec
from torchspec.drafts.eagle3.blocks import TrainingTimeTest
from torchspec.drafts.trainer import DraftTrainer
from torchspec.models.policy import PolicyOutput
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Batch, Rollout, SamplingLaw, Taps

MODES = ("policy alone", "taps sent", "last", "spread")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    schedules = ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]
    parser.add_argument("--schedule", default="1F1B", choices=schedules)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = Mesh(Parallel(pp=int(os.environ["WORLD_SIZE"])), device="cpu")
    report(args, mesh, Bench(args, mesh))
    mesh.close()


class Step(NamedTuple):
    """The slowest rank's seconds, the longest wait, the busiest rank's CPU seconds; of all ranks CPU and bytes."""

    seconds: float
    waited: float
    busiest: float
    cpu: float
    sent: float


class Bench:
    """The same policy and draft in every mode."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self.mesh = mesh
        config = Config()
        config.model.max_len = args.tokens
        config.draft.aux_layers = [2, args.layers // 2, args.layers - 2]
        config.parallel.schedule = args.schedule
        tiny = TinyModel(
            dim=args.dim,
            layers=args.layers,
            heads=args.dim // 32,
            kv_heads=args.dim // 64,
            head_dim=32,
            ffn_dim=3 * args.dim,
            tied=False,
        )
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "tiny"
            make_tiny(base, tiny, args.tokens, seed=0)
            spec = PolicySpec.from_hf(base)
            self.policies: dict[str, PipelinedPolicy] = {
                placement: load_pipelined(
                    base, spec, mesh, config.parallel, torch.float32, placement=placement, timeout_s=600
                )
                for placement in ("last", "spread")
            }
        self.draft = build_draft(config, mesh, draft_spec(config, spec), {}, [])
        objective = TrainingTimeTest(passes=args.passes, pass_decay=0.8, loss_rows=1024, row_block=256)
        self.trainer = DraftTrainer(self.draft, objective)
        draw = random.Random(0)
        tokens = [draw.randrange(3, 90) for _ in range(args.tokens)]
        half = args.tokens // 2
        rollout = Rollout(
            problem_id="p",
            sample=0,
            prompt_tokens=tokens[:half],
            tokens=tokens[half:],
            logprobs=[0.0] * (args.tokens - half),
            finish="stop",
            policy_version=0,
            draft_version=0,
        )
        self.packs = [packing.make_batch([rollout]) for _ in range(args.microbatches)]

    def step(self, mode: str) -> Step:
        """One step, with a new schedule, as in training."""
        policy = self.policies["spread" if mode == "spread" else "last"]
        how = {"law": SamplingLaw(temperature=1.0), "logprob_rows": 1024}
        head = policy.head_weight() if mode in ("last", "spread") else None
        aux = self.draft.spec.aux_layers

        def loss(index: int, output: PolicyOutput, batch: Batch) -> Tensor:
            return -output.logprobs.sum()

        def draft_step(batch: Batch, taps: Taps) -> None:
            if head is not None:
                self.trainer.backward(batch, taps, head, 1.0)

        self.mesh.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        if mode == "policy alone":
            policy.forward_backward(self.packs, loss, **how)
        else:
            policy.forward_backward(self.packs, loss, aux_layers=aux, draft_step=draft_step, **how)
        if head is not None:
            sum_gradients(self.draft, self.mesh)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        policy.zero_grad()
        self.draft.zero_grad()
        channel = policy.channel(aux) if mode != "policy alone" else None
        waited, sent = (channel.seconds_waited, channel.bytes_sent) if channel else (0.0, 0)
        tops = self.mesh.max_over_world(torch.tensor([seconds, waited, cpu], dtype=torch.float64))
        sums = self.mesh.sum_over_world(torch.tensor([cpu, float(sent)], dtype=torch.float64))
        return Step(*tops.tolist(), *sums.tolist())

    def stage_seconds(self, rounds: int = 3) -> float:
        """Seconds of one forward of this rank's stages on one microbatch, the best of some."""
        policy = self.policies["last"]
        best = float("inf")
        for _ in range(rounds):
            self.mesh.barrier()
            started = time.process_time()
            policy.score(self.packs[:1], law=SamplingLaw(temperature=1.0), logprob_rows=1024)
            best = min(best, time.process_time() - started)
        return best


def report(args: argparse.Namespace, mesh: Mesh, bench: Bench) -> None:
    draw = random.Random(1)  # the same order of modes on all ranks
    for mode in MODES:
        bench.step(mode)
    stage = bench.stage_seconds()
    rounds: list[dict[str, Step]] = []
    for _ in range(args.rounds):
        order = draw.sample(MODES, len(MODES))
        rounds.append({mode: bench.step(mode) for mode in order})
    if not mesh.is_main:
        return
    print(f"{args.schedule}, {mesh.pp_size} ranks, {args.microbatches} microbatches of {args.tokens} tokens,")
    print(f"a stage's forward takes {1000 * stage:.0f} ms of CPU; ratios to the policy alone:")
    print(
        f"{'mode':>14} {'step':>7} {'quartiles':>14} {'all CPU':>8} {'busiest':>8} {'wait':>7} {'MB sent':>8}"
    )
    for mode in MODES:

        def ratio(what: str, mode: str = mode) -> list[float]:
            return [getattr(r[mode], what) / getattr(r["policy alone"], what) for r in rounds]

        low, middle, high = statistics.quantiles(ratio("seconds"), n=4)
        cpu, busiest = (statistics.median(ratio(what)) for what in ("cpu", "busiest"))
        wait = statistics.median(r[mode].waited / r[mode].seconds for r in rounds)
        print(
            f"{mode:>14} {middle:7.3f} {f'{low:.2f} to {high:.2f}':>14} {cpu:8.3f} {busiest:8.3f} {wait:7.2%} "
            f"{rounds[0][mode].sent / 1e6:8.2f}"
        )
    for mode in MODES[1:]:
        print(
            f"bytes sent over the closed form, {mode}: {rounds[0][mode].sent / closed_form(bench, mode):.6f}"
        )


def closed_form(bench: Bench, mode: str) -> int:
    """b * n * sum_s d_s, over the stages s on another rank than a microbatch's sink."""
    policy = bench.policies["spread" if mode == "spread" else "last"]
    channel = policy.channel(bench.draft.spec.aux_layers)
    sinks = policy.draft_ranks(len(bench.packs))
    return sum(
        4 * len(pack.tokens) * made * bench.draft.spec.dim
        for pack, sink in zip(bench.packs, sinks, strict=True)
        for stage, made in channel.sources.items()
        if channel.stage_ranks[stage] != sink
    )


if __name__ == "__main__":
    main()
