"""Time and memory of branch attention against what one would write without it.

    python benchmarks/branch_attention.py --lengths 4096 8192 16384 --json branch_attention.json
    python benchmarks/branch_attention.py --device cuda --skip eager:forward:16384 eager:backward:16384

The first takes an hour on two cores (`--skip` leaves out the slowest), the second under three minutes.

One document, passes 1..K of training-time test, every scheme doing all of them:

    ours    branch_attention: causal flash over the trunk, branches merged in closed form
    dense   (a) SDPA over the keys of all passes side by side, under a dense mask
    flex    (b) the same under a compiled flex_attention block mask; on the CPU it has no backward
    eager   (c) matmul, mask, concatenated diagonals, softmax: as SpecForge and EAGLE do
    flash   (d) K plain causal passes of torch's own flash kernel, no branches

Each measurement is a process of its own, so that its peak memory is its own; compare within one run only.
The bars compare CPU time on one thread, which a machine's other load disturbs least. On CUDA, inputs are bf16,
"CPU s" is the GPU's time, and memory is what torch's allocator hands out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, PASSES = 8, 2, 64, 4
SCHEMES = ("ours", "dense", "flex", "eager", "flash")
# What is asked, as (scheme, other scheme, mode, measure, least length, bound on scheme / other).
BARS = [
    ("ours", "dense", "forward", "cpu", 16384, 1 / 8),
    ("ours", "flex", "forward", "cpu", 16384, 1 / 2.4),
    ("ours", "flash", "forward", "cpu", 8192, 1.15),
    ("ours", "flash", "backward", "cpu", 8192, 1.15),  # forward and backward
    ("ours", "dense", "forward", "bytes", 16384, 1 / 15),
]


def inputs(length: int, grad: bool, device: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """q, k, v of every pass: fp32 on the CPU, bf16 on CUDA."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def rand(heads: int) -> list[Tensor]:
        shape = length, heads, HEAD_DIM
        drawn = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(PASSES)]
        return [x.requires_grad_(grad) for x in drawn]

    return rand(HEADS), rand(KV_HEADS), rand(KV_HEADS)


def ours(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    from torchspec.attention import branch_attention

    cu = torch.tensor([0, len(q[0])], dtype=torch.int32)
    return [branch_attention(q[d], k[0], v[0], k[1 : d + 1], v[1 : d + 1], cu)[0] for d in range(PASSES)]


def flash(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    first = (heads_first(k[0]), heads_first(v[0]))
    return [
        F.scaled_dot_product_attention(heads_first(x), *first, is_causal=True, enable_gqa=True) for x in q
    ]


def dense(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    from torchspec.attention.reference import staircase_mask

    outs = []
    cu = torch.tensor([0, len(q[0])])
    for d in range(PASSES):
        keys, values = (heads_first(torch.cat(x[: d + 1])) for x in (k, v))
        mask = staircase_mask(cu, d).to(keys.device)
        outs.append(F.scaled_dot_product_attention(heads_first(q[d]), keys, values, mask, enable_gqa=True))
    return outs


def flex(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = len(q[0])

    def visible(_b: Tensor, _h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) | ((column >= length) & ((column - row) % length == 0))

    attend = torch.compile(flex_attention, dynamic=False)
    outs = []
    for d in range(PASSES):
        keys, values = (heads_first(torch.cat(x[: d + 1])) for x in (k, v))
        mask = create_block_mask(visible, None, None, length, length * (d + 1), device=q[d].device.type)
        outs.append(attend(heads_first(q[d]), keys, values, block_mask=mask, enable_gqa=True))
    return outs


def eager(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    length, group = len(q[0]), HEADS // KV_HEADS
    keys, values = ([heads_first(y.repeat_interleave(group, 1)) for y in x] for x in (k, v))
    hidden = torch.full((length, length), -torch.inf, dtype=q[0].dtype, device=q[0].device).triu(1)
    outs = []
    for d in range(PASSES):
        query = heads_first(q[d]) * HEAD_DIM**-0.5
        scores = query @ keys[0].transpose(-1, -2) + hidden
        own = [(query * keys[p]).sum(-1, keepdim=True) for p in range(1, d + 1)]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., :length] @ values[0]
        for p in range(1, d + 1):
            out = out + weights[..., length + p - 1, None] * values[p]
        outs.append(out)
    return outs


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def clocks(device: str) -> tuple[float, float]:
    """Wall seconds, and those of the CPU, or of the GPU: there, both are waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter(), time.perf_counter()
    return time.perf_counter(), time.process_time()


def measure(scheme: str, length: int, mode: str, device: str) -> dict[str, float]:
    """Seconds and CPU seconds of the fastest of a few runs (one where a run takes over a minute), and peak memory
    above the inputs'."""
    run: Callable[..., list[Tensor]] = globals()[scheme]
    tensors = inputs(length, mode == "backward", device)

    def step(*tensors: list[Tensor]) -> None:
        with torch.set_grad_enabled(mode == "backward"):
            outs = run(*tensors)
            if mode == "backward":
                torch.stack([out.sum() for out in outs]).sum().backward()

    step(*inputs(128, mode == "backward", device))  # imports, thread pools
    if scheme == "flex" or device == "cuda":
        step(*tensors)  # compilation is for a length
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, runs = peak_bytes(device), 2 if device == "cpu" else 5
    times: list[tuple[float, float]] = []
    while not times or (len(times) < runs and times[0][0] < 60):
        start = clocks(device)
        step(*tensors)
        end = clocks(device)
        times.append((end[0] - start[0], end[1] - start[1]))
    seconds, cpu = (min(column) for column in zip(*times))
    return {"seconds": seconds, "cpu": cpu, "bytes": peak_bytes(device) - before}


def in_process(scheme: str, length: int, mode: str, threads: int, device: str) -> dict[str, float] | None:
    """`measure` in a process of its own; None where it cannot be done."""
    command = [sys.executable, __file__, "--one", scheme, str(length), mode]
    command += ["--threads", str(threads), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{scheme} {length} {mode}: failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def wanted(scheme: str, length: int, mode: str, skip: list[str], device: str) -> bool:
    if f"{scheme}:{mode}:{length}" in skip:
        return False
    return not (scheme == "flex" and mode == "backward" and device == "cpu")  # NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--skip", nargs="*", default=[], help="scheme:mode:length to leave out, if too slow")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, default=Path("branch_attention.json"))
    parser.add_argument("--one", nargs=3, metavar=("SCHEME", "LENGTH", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.one[2], args.device)))
        return
    results: list[dict[str, Any]] = []
    print(f"{'length':>7} {'mode':>9} {'scheme':>7} {'seconds':>9} {'CPU s':>9} {'peak MB':>9}")
    for length in args.lengths:
        for mode in ("forward", "backward"):
            for scheme in args.schemes:
                found = wanted(scheme, length, mode, args.skip, args.device) and in_process(
                    scheme, length, mode, args.threads, args.device
                )
                if found:
                    results.append({"length": length, "mode": mode, "scheme": scheme, **found})
                    seconds, cpu, megabytes = found["seconds"], found["cpu"], found["bytes"] / 1e6
                    print(
                        f"{length:7} {mode:>9} {scheme:>7} {seconds:9.2f} {cpu:9.2f} {megabytes:9.1f}",
                        flush=True,
                    )
    bars = compare(results)
    for bar in bars:
        print(f"{bar['what']:60} {bar['ratio']:7.3f} (at most {bar['bound']:.3f})")
    args.json.write_text(json.dumps({"results": results, "bars": bars}, indent=1) + "\n")


def compare(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {(r["length"], r["mode"], r["scheme"]): r for r in results}
    bars = []
    for scheme, other, mode, what, least, bound in BARS:
        for length in sorted({r["length"] for r in results}):
            pair = found.get((length, mode, scheme)), found.get((length, mode, other))
            if length >= least and pair[0] and pair[1]:
                ratio = pair[0][what] / max(pair[1][what], 1e-9)
                name = f"{scheme} / {other}, {mode}, {what}, {length} tokens"
                bars.append({"what": name, "ratio": ratio, "bound": bound})
    return bars


if __name__ == "__main__":
    main()
