"""The suffix automata against brute force over all substrings, and the drafter that is made of them."""

import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchspec.records import Rollout
from torchspec.speculation.suffix import automaton as automata
from torchspec.speculation.suffix import kernels as batch
from torchspec.speculation.suffix.drafter import PROMPT_TAIL, RECENT, SuffixDrafter, problem_key

BEST, CONT, COUNT, LEN, TOKEN = automata.BEST, automata.CONT, automata.COUNT, automata.LEN, automata.TOKEN
text = st.lists(st.integers(0, 2), max_size=24) | st.lists(st.integers(0, 2**31 - 1), max_size=8)
texts = st.lists(text, min_size=1, max_size=4)
ADVERSARIAL = [
    [0] * 20 + [1] + [0] * 20 + [2],
    [0, 1] * 10,
    [0] * 20,
    [0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1],
]
NESTED = [[50, 3, 2, 1, 99], [97, *range(20, 0, -1), 99], *([*range(k, 0, -1)] for k in range(1, 20))]
"""The second 99 splits a state that suffixes lead to which are too short for a live automaton to count."""


def rollout(
    tokens: list[int], problem: str = "p", sample: int = 0, prompt: list[int] | None = None
) -> Rollout:
    return Rollout(
        problem_id=problem,
        sample=sample,
        prompt_tokens=prompt or [],
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        finish="stop",
        policy_version=0,
        draft_version=0,
    )


def frozen(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return automata.build(np.array(list(chain.from_iterable(sequences)), np.int32), starts)


def continuations(sequences: list[list[int]], pattern: list[int]) -> tuple[int, Counter]:
    """Occurrences of `pattern`, and how often each token follows."""
    count, after = 0, Counter()
    for sequence in sequences:
        for end in range(len(pattern), len(sequence) + 1):
            if sequence[end - len(pattern) : end] == pattern:
                count += 1
                if end < len(sequence):
                    after[sequence[end]] += 1
    return count, after


def most_frequent(after: Counter) -> int:
    return min(after, key=lambda token: (-after[token], token))


def longest_match(sequences: list[list[int]], context: list[int]) -> list[int]:
    return next(
        context[i:]
        for i in range(len(context) + 1)
        if continuations(sequences, context[i:])[0] or i == len(context)
    )


def substrings(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(s[i:j]) for s in sequences for i in range(len(s)) for j in range(i + 1, len(s) + 1)}


def walk(nodes: np.ndarray, slots: np.ndarray, pattern) -> int:
    state = 0
    for token in pattern:
        state = automata.child(nodes, slots, state, token)
        if state < 0:
            break
    return state


@settings(max_examples=150, deadline=None)
@given(sequences=texts, probe=text)
@example(sequences=ADVERSARIAL, probe=[0] * 21)
def test_frozen_automaton_knows_every_substring_its_count_and_its_continuations(sequences, probe):
    nodes, slots = frozen(sequences)
    for pattern in substrings(sequences):
        state = walk(nodes, slots, pattern)
        count, after = continuations(sequences, list(pattern))
        assert state > 0
        assert nodes[state, COUNT] == count
        assert nodes[state, CONT] == after.total()
        assert after.total() == 0 or nodes[nodes[state, BEST], TOKEN] == most_frequent(after)
    assert (walk(nodes, slots, probe) >= 0) == (tuple(probe) in substrings(sequences) or not probe)


def live(sequences: list[list[int]]) -> tuple[SuffixDrafter, int, np.ndarray, np.ndarray]:
    """A live automaton that the sequences were appended to token by token, in turn."""
    drafter = SuffixDrafter()
    for i in range(len(sequences)):
        drafter.start(f"r{i}", "p", [])
    for at in range(max(map(len, sequences))):
        running = [i for i, s in enumerate(sequences) if at < len(s)]
        drafter.advance([f"r{i}" for i in running], [[sequences[i][at]] for i in running])
    automaton = drafter._groups["p"]
    states = drafter._table[automaton, automata.T_STATES]
    nodes, slots = drafter._arrays[automaton]
    return drafter, states, nodes, slots


@settings(max_examples=100, deadline=None)
@given(sequences=texts)
@example(sequences=ADVERSARIAL)
@example(sequences=NESTED)
def test_live_automaton_is_the_frozen_one_before_it_is_frozen(sequences):
    if not any(sequences):
        return
    _, states, nodes, slots = live(sequences)
    assert states == len(frozen(sequences)[0])
    for pattern in substrings(sequences):
        state = walk(nodes, slots, pattern)
        count, after = continuations(sequences, list(pattern))
        assert state > 0
        best = nodes[state, BEST]
        assert best < 0 or best == automata.child(nodes, slots, state, nodes[best, TOKEN])
        assert nodes[state, COUNT] <= count
        assert nodes[state, CONT] <= after.total()
        if max(map(len, sequences)) <= automata.COUNTED_SUFFIXES:  # no suffix chain is cut
            assert nodes[state, COUNT] == count
            assert nodes[state, CONT] == after.total()
            assert not after or nodes[nodes[state, BEST], TOKEN] == most_frequent(after)


@settings(max_examples=60, deadline=None)
@given(generations=st.lists(texts, min_size=1, max_size=3), prompt=text, output=text)
@example(generations=[ADVERSARIAL, [[1, 0, 2]]], prompt=[1, 0], output=[0] * 12 + [1, 0, 0, 2, 1, 0, 1])
def test_cursors_are_at_the_longest_match_after_every_token(generations, prompt, output):
    drafter = SuffixDrafter()
    for iteration, sequences in enumerate(generations):
        drafter.add_rollouts(iteration, [rollout(s, sample=i) for i, s in enumerate(sequences)])
    drafter.start("r", "p", prompt)
    seen = prompt[-PROMPT_TAIL:]
    for token in [None, *output]:
        if token is not None:
            drafter.advance(["r"], [[token]])
            seen = [*seen, token]
        drafter.propose(["r"], [4])
        rows = drafter._requests
        for scope, sequences in enumerate(generations[::-1], batch.PROBLEM):
            match = longest_match(sequences, seen)
            nodes, _ = drafter._arrays[rows.automata[0, scope]]
            assert rows.matches[0, scope] == len(match)
            assert nodes[rows.states[0, scope], COUNT] == continuations(sequences, match)[0] or not match
    own = prompt + output
    repeated = [own[i:] for i in range(len(own)) if continuations([own], own[i:])[1]]
    assert drafter._requests.matches[0, batch.SELF] == len(repeated[0] if repeated else [])


def brute_force_draft(sequences: list[list[int]], context: list[int], limit: int) -> list[int]:
    """Follow the most frequent continuation of the longest match; where none is known, of a shorter one."""
    context, draft = longest_match(sequences, context), []
    while len(draft) < limit and context:
        after = continuations(sequences, context)[1]
        if after:
            draft.append(most_frequent(after))
            context = [*context, draft[-1]]
        else:
            context = longest_proper(sequences, context)
    return draft


def longest_proper(sequences: list[list[int]], context: list[int]) -> list[int]:
    """The longest suffix that also occurs where `context` does not: the suffix link."""
    count = continuations(sequences, context)[0]
    return next(
        (context[i:] for i in range(1, len(context)) if continuations(sequences, context[i:])[0] > count), []
    )


@settings(max_examples=100, deadline=None)
@given(sequences=texts, context=text)
@example(sequences=ADVERSARIAL, context=[0, 1, 0])
def test_drafts_follow_the_most_frequent_continuation(sequences, context):
    drafter = SuffixDrafter()
    drafter.add_rollouts(0, [rollout(s, sample=i) for i, s in enumerate(sequences)])
    drafter.start("r", "p", [])
    drafter._requests.automata[0, : batch.PROBLEM] = -1  # history alone
    drafter.advance(["r"], [context])
    drafts = drafter.propose(["r"], [6])
    assert drafts.lists() == [brute_force_draft(sequences, context, 6)]
    assert (np.diff(drafts.probs) <= 0).all()


def test_a_singleton_is_not_certain_and_ends_are_no_evidence():
    once, often = SuffixDrafter(), SuffixDrafter()
    once.add_rollouts(0, [rollout([1, 2, 3])])
    often.add_rollouts(0, [rollout([1, 2, 3], sample=i) for i in range(9)])
    ending = SuffixDrafter()
    ending.add_rollouts(0, [rollout([1, 2, 3])] + [rollout([1, 2], sample=i) for i in range(1, 9)])
    probs = {}
    for name, drafter in {"once": once, "often": often, "ending": ending}.items():
        drafter.start("r", "p", [])
        drafter.advance(["r"], [[1, 2]])
        drafts = drafter.propose(["r"], [4])
        assert drafts.lists() == [[3]]
        probs[name] = drafts.probs[0]
    assert probs["once"] == pytest.approx(1.5 / 2)
    assert probs["often"] == pytest.approx(9.5 / 10)
    assert probs["ending"] == pytest.approx(1.5 / 2)


def test_calibration_learns_what_is_accepted_even_while_nothing_is_verified():
    """The same context is continued as before in a fifth of the cases: the estimate goes there."""
    drafter = SuffixDrafter(recency=1.0)
    drafter.add_rollouts(0, [rollout([1, 2, 3, 4])])
    rng = np.random.default_rng(0)
    for i in range(400):
        drafter.start(f"r{i}", "p", [])
        drafter.advance([f"r{i}"], [[1, 2]])
        drafter._requests.automata[0, batch.GROUP] = -1
        last = drafter.propose([f"r{i}"], [1]).probs
        drafter.advance([f"r{i}"], [[3 if rng.random() < 0.2 else 9]])
        drafter.stop(f"r{i}")
    assert last[0] == pytest.approx(0.2, abs=0.06)


def test_only_what_was_tried_is_calibrated():
    drafter = SuffixDrafter()
    drafter.add_rollouts(0, [rollout([1, 2, 3, 4, 5, 6])])
    drafter.start("r", "p", [])
    drafter.advance(["r"], [[1, 2]])
    assert drafter.propose(["r"], [4]).lists() == [[3, 4, 5, 6]]
    drafter.advance(["r"], [[3, 9, 5]])  # 3 is accepted, 4 is not, 5 and 6 were never tried
    assert drafter._accepted.sum() == 1
    assert drafter._predicted.sum() == pytest.approx(2 * 0.75)
    drafter.advance(["r"], [[3]])  # there is no new draft to compare with
    assert drafter._accepted.sum() == 1


def test_limits_and_floors_cut_drafts():
    drafter = SuffixDrafter(max_draft=5)
    drafter.add_rollouts(0, [rollout(list(range(1, 30)), sample=i) for i in range(3)])
    for i in range(4):
        drafter.start(f"r{i}", "p", [])
    ids = [f"r{i}" for i in range(4)]
    drafter.advance(ids, [[1, 2]] * 4)
    free = drafter.propose(ids, [0, 2, 99, -3])
    assert free.lengths.tolist() == [0, 2, 5, 0]
    assert free.starts.tolist() == [0, 0, 2, 7, 7]
    floor = float(free.probs[2 + 2]) - 1e-6
    cut = drafter.propose(ids, [5] * 4, [floor, 0.0, 1.0, 2.0])
    assert cut.lengths.tolist() == [3, 5, 0, 0]


def test_nothing_known_means_no_draft_and_prompts_are_a_scope():
    drafter = SuffixDrafter()
    drafter.start("r", "never seen", [])
    assert drafter.propose(["r"], [8]).lists() == [[]]
    drafter.advance(["r"], [[]])
    drafter.advance(["r"], [[5]])
    assert drafter.propose(["r"], [8]).lists() == [[]]
    drafter.start("s", None, [1, 2, 3, 4, 1, 2])
    assert drafter.propose(["s", "r"], [2, 2]).lists() == [[3, 4], []]
    assert drafter.propose([], []).lists() == []


def test_a_sibling_in_flight_is_drafted_from():
    drafter = SuffixDrafter()
    drafter.start("a", "p", [7])
    drafter.start("b", "p", [7])
    drafter.start("other", "q", [7])
    drafter.advance(["a"], [[1, 2, 3, 4]])
    drafter.advance(["b", "other"], [[1, 2], [1, 2]])
    assert drafter.propose(["b", "other"], [2, 2]).lists() == [[3, 4], []]
    drafter.stop("a")
    assert drafter.propose(["b"], [2]).lists() == [[3, 4]]
    drafter.begin_iteration(1)
    assert drafter.propose(["b"], [2]).lists() == [[3, 4]]  # b is running: its group is
    drafter.stop("b")
    drafter.stop("other")
    drafter.begin_iteration(2)
    assert drafter.live_bytes == 0


def test_the_key_is_the_problem_id_or_a_hash_of_the_prompt():
    assert problem_key("a", [1]) == "a"
    assert problem_key(None, [1, 2]) == problem_key(None, [1, 2]) != problem_key(None, [1, 3])
    drafter = SuffixDrafter()
    drafter.add_rollouts(0, [rollout([5, 6, 7], problem=problem_key(None, [1, 2]), prompt=[1, 2])])
    drafter.start("r", None, [1, 2])
    assert drafter.propose(["r"], [3]).lists() == [[5, 6, 7]]  # the prompt's end leads to the response


def test_generations_leave_by_age_and_by_bytes_oldest_first():
    drafter = SuffixDrafter(window=3)
    for iteration in range(5):
        drafter.begin_iteration(iteration)
        drafter.add_rollouts(iteration, [rollout([iteration] * 9, p) for p in ("a", "b")])
        expected = list(range(max(0, iteration - 2), iteration + 1))
        assert drafter.generations("a") == drafter.generations("b") == expected
    one = drafter.history_bytes // 6
    drafter.max_bytes = 5 * one
    drafter.begin_iteration(5)  # 2 is out of the window by now
    assert (drafter.generations("a"), drafter.generations("b")) == ([3, 4], [3, 4])
    drafter.max_bytes = 3 * one
    drafter.begin_iteration(5)
    assert (drafter.generations("a"), drafter.generations("b")) == ([4], [3, 4])
    assert drafter.history_bytes <= drafter.max_bytes
    drafter.begin_iteration(99)
    assert drafter.history_bytes == 0
    assert drafter.generations("a") == []


def test_a_running_request_follows_changes_of_its_history():
    """A generation that comes or goes in mid-flight leaves cursors as if they had always been there."""
    output = [int(t) for t in np.random.default_rng(0).integers(0, 3, 90)]
    drafter = SuffixDrafter(window=2)
    drafter.begin_iteration(0)
    drafter.start("r", "p", [1, 2])
    drafter.advance(["r"], [output[:80]])
    for iteration in range(4):
        drafter.begin_iteration(iteration)
        history = [output[iteration : 70 + iteration], [1, 2, 0]]
        drafter.add_rollouts(iteration, [rollout(s, sample=i) for i, s in enumerate(history)])
        drafter.advance(["r"], [output[80 + iteration : 81 + iteration]])
        match = longest_match(history, output[: 81 + iteration][-RECENT - 1 :])
        assert drafter._requests.matches[0, batch.PROBLEM] == len(match)
        assert (drafter._requests.automata[0] >= 0).sum() == 2 + min(iteration + 1, 2)


def test_ranks_agree_whatever_the_order_of_a_batch():
    rng = np.random.default_rng(1)
    outputs = {f"r{i}": rng.integers(0, 3, 40).tolist() for i in range(70)}
    history = [rollout(rng.integers(0, 3, 50).tolist(), f"p{i % 3}", i) for i in range(9)]
    proposals, groups = [], []
    for order in (sorted(outputs), sorted(outputs, reverse=True)):
        drafter = SuffixDrafter()
        drafter.add_rollouts(0, history if order[0] == "r0" else history[::-1])
        for r in sorted(outputs):
            drafter.start(r, f"p{int(r[1:]) % 3}", [1, 2])
        steps = []
        for at in range(0, 40, 2):
            drafter.advance(order, [outputs[r][at : at + 2] for r in order])
            drafts = drafter.propose(order, [6] * 70, [0.05] * 70)
            steps.append(dict(zip(order, drafts.lists())))
        proposals.append(steps)
        group = drafter._groups["p0"]
        groups.append(drafter._arrays[group][0][: drafter._table[group, automata.T_STATES]].tolist())
    assert proposals[0] == proposals[1]
    assert groups[0] == groups[1]
    assert any(proposals[0][-1].values())


def test_requests_come_and_go():
    """More requests than rows, freed rows are used again, and what was freed is forgotten."""
    drafter = SuffixDrafter()
    for i in range(150):
        drafter.start(f"r{i}", f"p{i}", [i, i + 1, i])
    with pytest.raises(ValueError, match="r3"):
        drafter.start("r3", "p", [])
    assert drafter.propose(["r149", "r0"], [1, 1]).lists() == [[150], [1]]
    for i in range(150):
        drafter.stop(f"r{i}")
    drafter.start("again", "new", [])
    assert drafter.propose(["again"], [1]).lists() == [[]]
    with pytest.raises(KeyError):
        drafter.propose(["r0"], [1])


def test_one_problem_with_a_million_tokens():
    rng = np.random.default_rng(2)
    phrases = [rng.integers(0, 30_000, 40).tolist() for _ in range(3000)]
    output = list(chain.from_iterable(phrases[i] for i in rng.integers(0, 3000, 25_000)))
    drafter = SuffixDrafter()
    drafter.add_rollouts(0, [rollout(output)])
    assert len(output) == 1_000_000
    assert drafter.history_bytes < 60 * len(output)
    drafter.start("r", "p", [])
    drafter.advance(["r"], [output[: 40 * 100 + 7]])
    assert drafter.propose(["r"], [8]).lists() == [output[4007:4015]]


def test_a_long_run_of_one_token():
    """Each new token gives every suffix an edge: the tables must grow by more than a step's share."""
    run = [0] * 20_000 + [1]
    nodes, slots = frozen([run])
    assert nodes[walk(nodes, slots, [0] * 100), COUNT] == 20_000 - 99
    assert nodes[walk(nodes, slots, [0] * 20_000 + [1]), COUNT] == 1
    _, states, live_nodes, live_slots = live([run])
    assert states == len(nodes)
    assert walk(live_nodes, live_slots, [0, 1]) > 0


def test_compiled_code_is_kept_outside_the_repository(tmp_path: Path):
    code = (
        "import numba; before = numba.config.CACHE_DIR;"
        "from torchspec.speculation.suffix import automaton as k;"
        "print(numba.config.CACHE_DIR == before, k.build.stats.cache_path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
    )
    same, folder = done.stdout.split()
    assert same == "True"
    assert folder.startswith(str(tmp_path / "torchspec" / "numba"))
