"""The suffix drafter beside Arctic Inference's SuffixDecodingCache: same corpus, same requests, one process.

    python benchmarks/suffix.py                        # 48k, 480k and 2.4M tokens
    python benchmarks/suffix.py --tokens 48000 --depth 64

The corpus stands for many rollouts of one problem: phrases that all of them share, between tokens drawn from a
Zipf law. Both drafters hold the same history, one problem and one generation, and then follow the same held-out
rollouts in lockstep; both may propose 24 tokens while the path probability is at least 0.1 (vLLM's setting of
method "suffix", which is also where the depth of 24 comes from), then again with 0.5. Arctic's drafts are also no
longer than the match they follow. Times are the best of three for building and sums over all steps for proposing,
both of this process's CPU. Memory is the growth of the resident set while a fresh process builds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from torchspec.records import Rollout
from torchspec.speculation.suffix.drafter import SuffixDrafter

INSTALL = (
    "Arctic is not installed (best in a venv of its own): pip install nanobind==2.9.2 wheel ninja 'cmake<4.3' "
    "grpcio-tools && pip install --no-build-isolation --no-deps arctic-inference==0.3.0"
)
MAX_DRAFT = 24
FLOOR, HIGH_FLOOR = 0.1, 0.5
PROMPT, DECODED = 24, 200
ROLLOUT = 6000
BATCHES = (1, 32, 256)
UNITS = {"insert": "us/token", "bytes": "bytes/token", "accepted": "tokens/step", "drafted": "tokens/step"}
BARS = {"insert": 1 / 4, "propose at 256": 1 / 5, "bytes": 1 / 3, "accepted": 1.0}


def make_rollouts(
    count: int, length: int, rng: np.random.Generator, phrases: list[np.ndarray]
) -> list[list[int]]:
    """Token lists: with probability 0.6 a phrase (the low-numbered more often), else six Zipf tokens."""
    weights = 1.0 / (np.arange(32_000) + 10)
    weights = np.cumsum(weights / weights.sum())
    rollouts = []
    for _ in range(count):
        parts, have = [], 0
        while have < length:
            shared = rng.random() < 0.6
            part = (
                phrases[int(len(phrases) * rng.random() * rng.random())] if shared else zipf(6, rng, weights)
            )
            parts.append(part)
            have += len(part)
        rollouts.append(np.concatenate(parts)[:length].tolist())
    return rollouts


def zipf(count: int, rng: np.random.Generator, cumulative: np.ndarray) -> np.ndarray:
    return np.searchsorted(cumulative, rng.random(count))


def make_phrases(rng: np.random.Generator) -> list[np.ndarray]:
    weights = 1.0 / (np.arange(32_000) + 10)
    weights = np.cumsum(weights / weights.sum())
    return [zipf(4 + rng.geometric(1 / 12), rng, weights) for _ in range(400)]


class Ours:
    name = "torchspec"

    def __init__(self, depth: int) -> None:
        self.drafter = SuffixDrafter(max_draft=MAX_DRAFT)

    def build(self, history: list[list[int]]) -> None:
        self.drafter.add_rollouts(0, [as_rollout(i, tokens) for i, tokens in enumerate(history)])

    def start(self, request: int, prompt: list[int]) -> None:
        self.drafter.start(str(request), "problem", prompt)

    def stop(self, request: int) -> None:
        self.drafter.stop(str(request))

    def propose(self, requests: list[int], contexts: list[np.ndarray], floor: float) -> list[list[int]]:
        floors = np.full(len(requests), floor)
        return self.drafter.propose([str(r) for r in requests], [MAX_DRAFT] * len(requests), floors).lists()

    def advance(self, requests: list[int], tokens: list[list[int]]) -> None:
        self.drafter.advance([str(r) for r in requests], tokens)


class Arctic:
    name = "arctic"

    def __init__(self, depth: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.depth = depth
        self.cache = SuffixDecodingCache(max_tree_depth=depth)

    def build(self, history: list[list[int]]) -> None:
        """Into the global tree alone: the cache's own insertion would also fill a tree per request."""
        from arctic_inference.suffix_decoding.cache import SuffixTree

        for i, tokens in enumerate(history):
            sequence = self.cache._generate_seq_id(f"history {i}")
            SuffixTree.extend_ndarray(self.cache._global_tree, sequence, np.array(tokens, np.int32))

    def start(self, request: int, prompt: list[int]) -> None:
        self.cache.start_request(request, np.array(prompt, np.int32))

    def stop(self, request: int) -> None:
        self.cache.stop_request(request)

    def propose(self, requests: list[int], contexts: list[np.ndarray], floor: float) -> list[list[int]]:
        cache = self.cache
        return [
            cache.speculate(r, c, max_spec_tokens=MAX_DRAFT, min_token_prob=floor).token_ids
            for r, c in zip(requests, contexts)
        ]

    def advance(self, requests: list[int], tokens: list[list[int]]) -> None:
        for r, new in zip(requests, tokens):
            self.cache.add_active_response(r, np.array(new, np.int32))


def as_rollout(sample: int, tokens: list[int]) -> Rollout:
    return Rollout(
        problem_id="problem", sample=sample, prompt_tokens=[], tokens=tokens, logprobs=[], finish="stop",
        policy_version=0, draft_version=0,
    )  # fmt: skip


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_fresh_process(function: Callable[..., object], *args: object):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def build_bytes(kind: type, depth: int, history: list[list[int]]) -> int:
    kind(depth).build(history[:1])  # loads and touches the code
    drafter = kind(depth)
    before = resident_bytes()
    drafter.build(history)
    return resident_bytes() - before


def build_seconds(kind: type, depth: int, history: list[list[int]], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        drafter = kind(depth)
        begin = time.process_time()
        drafter.build(history)
        best = min(best, time.process_time() - begin)
    return best


def decode(
    drafter: Ours | Arctic, first: int, texts: list[list[int]], depth: int, floor: float = FLOOR
) -> tuple[float, float, float]:
    """Follow `texts` in lockstep as requests first, first + 1, ...

    Returns, each per request and step: seconds of proposing and of advancing, accepted and drafted tokens.
    """
    arrays = [np.array(text, np.int32) for text in texts]
    for i, text in enumerate(texts):
        drafter.start(first + i, text[:PROMPT])
    at = [PROMPT] * len(texts)
    propose_s = advance_s = 0.0
    steps = accepted = drafted = 0
    while running := [i for i in range(len(texts)) if at[i] < len(texts[i])]:
        requests = [first + i for i in running]
        contexts = [arrays[i][max(0, at[i] - depth) : at[i]] for i in running]
        t0 = time.process_time()
        drafts = drafter.propose(requests, contexts, floor)
        t1 = time.process_time()
        new = []
        for i, draft in zip(running, drafts):
            left = texts[i][at[i] : at[i] + len(draft) + 1]
            hits = 0
            while hits < min(len(draft), len(left)) and draft[hits] == left[hits]:
                hits += 1
            new.append(left[: hits + 1])
            accepted += hits
            drafted += len(draft)
            at[i] += len(new[-1])
        t2 = time.process_time()
        drafter.advance(requests, new)
        advance_s += time.process_time() - t2
        propose_s += t1 - t0
        steps += len(running)
    for i in range(len(texts)):
        drafter.stop(first + i)
    return propose_s / steps, advance_s / steps, accepted / steps, drafted / steps


def measure(kind: type, depth: int, history: list[list[int]], texts: list[list[int]]) -> dict[str, float]:
    tokens = sum(map(len, history))
    kind(depth).build(history[:1])
    row = {"bytes": in_fresh_process(build_bytes, kind, depth, history) / tokens}
    row["insert"] = build_seconds(kind, depth, history) / tokens * 1e6
    drafter = kind(depth)
    drafter.build(history)
    decode(drafter, 0, texts[:2], depth)  # compiles
    first = 2
    for batch in BATCHES:  # each its own texts: what was decoded before is remembered
        propose, advance, accepted, drafted = decode(drafter, first, texts[first : first + batch], depth)
        first += batch
        row[f"propose at {batch}"] = propose * 1e6
        row[f"advance at {batch}"] = advance * 1e6
    row["accepted"], row["drafted"] = accepted, drafted
    drafter = kind(depth)
    drafter.build(history)
    _, _, row["accepted, 0.5"], row["drafted, 0.5"] = decode(
        drafter, 0, texts[first - batch :], depth, HIGH_FLOOR
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[48_000, 480_000, 2_400_000])
    parser.add_argument("--depth", type=int, default=24, help="Arctic's max_tree_depth")
    options = parser.parse_args()
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError:
        print(INSTALL, file=sys.stderr)
        kinds = [Ours]
    else:
        kinds = [Ours, Arctic]
    rng = np.random.default_rng(0)
    phrases = make_phrases(rng)
    texts = make_rollouts(2 + sum(BATCHES), PROMPT + DECODED, rng, phrases)
    failed = 0
    for tokens in options.tokens:
        history = make_rollouts(tokens // ROLLOUT, ROLLOUT, rng, phrases)
        rows = {kind.name: measure(kind, options.depth, history, texts) for kind in kinds}
        print(f"\n{tokens} tokens{'':<18}" + "".join(f"{name:>12}" for name in rows) + "     ratio   bar")
        for what in rows["torchspec"]:
            unit = UNITS.get(what.split(",")[0], "us/request")
            line = f"{what:<16}{unit:<14}" + "".join(f"{row[what]:>12.3f}" for row in rows.values())
            if "arctic" in rows:
                ratio = rows["torchspec"][what] / rows["arctic"][what]
                bar = BARS.get(what)
                holds = bar is None or (ratio >= bar if what == "accepted" else ratio <= bar)
                failed += not holds
                line += f"{ratio:>10.3f}" + (f"  {bar:.2f} {'ok' if holds else 'MISSED'}" if bar else "")
            print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
