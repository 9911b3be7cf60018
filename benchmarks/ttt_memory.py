"""Peak memory of one draft backward (all K passes, forward and backward), with and without row blocks.

    python benchmarks/ttt_memory.py --rows 8192 --row-blocks 0 512 256 128 --json ttt_memory.json

The real draft on one pack, fp32 on the CPU, each measurement in a process of its own. What is counted is the
resident set above that of weights, taps and gradients; freed memory goes back to the system at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from torchspec.data.packing import make_batch
from torchspec.drafts.eagle3.blocks import TrainingTimeTest
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.eagle3.spec import Eagle3Spec
from torchspec.drafts.trainer import DraftTrainer
from torchspec.records import Rollout, Taps

PASSES = (1, 4, 7)
BOUND = 1.25  # peak at K = 7 over that at K = 1, with row blocks
SPEC = Eagle3Spec(
    vocab_size=2048,
    draft_vocab_size=2048,
    dim=256,
    heads=8,
    kv_heads=2,
    head_dim=64,
    ffn_dim=768,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_len=1 << 20,
    aux_layers=(2, 4, 6),
    fc_norm=True,
    norm_output=True,
)


def document(length: int) -> Rollout:
    """A short prompt and a response, together `length` tokens."""
    response = torch.randint(0, SPEC.vocab_size, (length - 8,)).tolist()
    return Rollout(
        problem_id="",
        sample=0,
        prompt_tokens=[1] * 8,
        tokens=response,
        logprobs=[0.0] * len(response),
        finish="length",
        policy_version=0,
        draft_version=0,
    )


def measure(rows: int, passes: int, row_block: int) -> int:
    """Bytes."""
    torch.manual_seed(0)
    embeds, *aux, final = torch.randn(5, rows, SPEC.dim)
    head = torch.randn(SPEC.vocab_size, SPEC.dim)
    objective = TrainingTimeTest(passes=passes, pass_decay=0.8, loss_rows=256, row_block=row_block)
    trainer = DraftTrainer(Eagle3(SPEC), objective)

    def step(length: int) -> None:
        batch = make_batch([document(length)])
        taps = Taps(embeds=embeds[:length], aux=tuple(x[:length] for x in aux), final=final[:length])
        trainer.backward(batch, taps, head, trainer.denominator(trainer.counts(batch)))

    step(64)  # threads, code, and the weights' gradients
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(rows)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def in_process(rows: int, passes: int, row_block: int) -> int:
    command = [sys.executable, __file__, "--rows", str(rows), "--one", str(passes), str(row_block)]
    # glibc otherwise keeps freed blocks of up to 32 MB, by a threshold that moves.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="tokens of the pack")
    parser.add_argument("--row-blocks", type=int, nargs="+", default=[0, 512, 256, 128], help="0: all rows")
    parser.add_argument("--json", type=Path, default=Path("ttt_memory.json"))
    parser.add_argument("--one", type=int, nargs=2, metavar=("PASSES", "BLOCK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args.rows, *args.one))
        return
    results = {}
    print(f"{args.rows} rows; peak MB above weights, taps and gradients, and the ratio to K = 1")
    for block in args.row_blocks:
        peaks = results[block] = {passes: in_process(args.rows, passes, block) for passes in PASSES}
        name = f"blocks of {block}" if block else "all rows at once"
        columns = (f"K={k} {peak / 1e6:8.1f} ({peak / peaks[1]:.2f})" for k, peak in peaks.items())
        print(f"{name:>18}  " + "   ".join(columns), flush=True)
    smallest = results[min(args.row_blocks, key=lambda block: block or args.rows)]
    print(f"smallest block, K = 7 over K = 1: {smallest[7] / smallest[1]:.2f} (at most {BOUND})")
    args.json.write_text(json.dumps({"rows": args.rows, "bytes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
