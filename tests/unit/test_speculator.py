"""Who drafts how much: choices, counts, limits and state of the Speculator, without an engine."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspec.config.schema import Config
from torchspec.errors import GuardStop
from torchspec.records import Rollout
from torchspec.speculation.budgets.base import Allowance
from torchspec.speculation.cost_table import CostTable
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.model_gate import PATIENCE, PROBES, REST
from torchspec.speculation.speculator import MODEL, SUFFIX, Speculator
from torchspec.speculation.suffix.drafter import SuffixDrafter

FREE = CostTable.linear(1.0, 0.0)
PROMPT = [1, 2, 3, 4]
TEXT = list(range(10, 40))


def make(drafter: str, cost: CostTable = FREE, policy: str = "price", tokens: int = 4) -> Speculator:
    config = Config()
    config.rollout.drafter = drafter
    config.rollout.num_draft_tokens = tokens
    config.suffix.max_draft = 8
    config.budget.rule = policy
    speculator = Speculator(config, LengthStats(default=30), cost)
    speculator.gate.probes = ()
    return speculator


def rollout(problem: str = "p", sample: int = 0, tokens: list[int] | None = None) -> Rollout:
    tokens = TEXT if tokens is None else tokens
    return Rollout(
        problem_id=problem,
        sample=sample,
        prompt_tokens=PROMPT,
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        finish="stop",
        policy_version=0,
        draft_version=0,
    )


def step(speculator: Speculator, ids: list[str], tokens: list[list[int]], chain: int = 99) -> list[list[int]]:
    """One step in which nothing had been verified; the draft model proposes `chain` again and again."""
    zero = [0] * len(ids)
    speculator.advance(ids, tokens, zero, zero, 0.0)
    plan = speculator.plan(ids)
    return speculator.complete(plan, [[chain] * (plan.passes or 0)] * len(ids))


def test_without_history_the_model_drafts_and_with_it_the_suffix_drafter() -> None:
    speculator = make("hybrid")
    speculator.begin("0", "p", PROMPT, 100)
    assert step(speculator, ["0"], [TEXT[:1]]) == [[99] * 4]
    speculator.end("0")
    speculator.learn(0, [rollout(sample=s) for s in range(8)])
    speculator.gate.probes = ()
    speculator.begin("1", "p", PROMPT, 100)
    assert step(speculator, ["1"], [TEXT[:1]]) == [TEXT[1:9]]
    assert speculator.plan(["1"]).passes == 0


def test_the_suffix_drafter_goes_on_behind_the_models_chain() -> None:
    speculator = make("hybrid")
    speculator.learn(0, [rollout(sample=s) for s in range(8)])
    speculator.gate.probes = (1,)  # the model drafts
    speculator.begin("0", "p", PROMPT, 100)
    speculator.advance(["0"], [TEXT[:1]], [0], [0], 0.0)
    plan = speculator.plan(["0"])
    assert (plan.passes, plan.chains.tolist()) == (4, [4])
    assert speculator.complete(plan, [TEXT[1:5]]) == [TEXT[1:9]]
    assert speculator.complete(plan, [[99] * 4]) == [[99] * 4]


@pytest.mark.parametrize("chain", [TEXT[1:5], [99] * 4, [11, 99, 11, 99]])
def test_what_the_model_proposes_does_not_depend_on_its_tokens(chain) -> None:
    """The rule that losslessness rests on: the tokens are drawn after it is decided how many count."""
    speculator = make("hybrid", CostTable(tokens=[0, 10], batches=[1], seconds=[[1.0, 1.2]]))
    speculator.learn(0, [rollout()])
    speculator.gate.probes = (1,)
    speculator.begin("0", "p", PROMPT, 100)
    speculator.advance(["0"], [TEXT[:1]], [0], [0], 0.0)
    plan = speculator.plan(["0"])
    (draft,) = speculator.complete(plan, [chain])
    assert draft[: plan.chains[0]] == chain[: plan.chains[0]]
    assert plan.chains[0] > 0


def test_passes_end_where_they_cost_more_than_they_save() -> None:
    def passes(each: float) -> int | None:
        cost = CostTable(tokens=[0, 10], batches=[1], seconds=[[1.0, 1.0]], draft=[[0.0, each]])
        speculator = make("hybrid", cost)
        speculator.begin("0", "p", PROMPT, 100)
        step(speculator, ["0"], [TEXT[:1]])
        return speculator.plan(["0"]).passes

    # Untried positions are accepted with 1/2 each: a first token saves 1/2 of a step, a second 1/4, a third 1/8.
    assert passes(0.01) == 4
    assert passes(0.09) == 2  # the second brings 1.75 / 1.18, a third 1.875 / 1.27
    assert passes(0.6) == 0


def test_a_model_that_is_not_worth_its_time_is_left_out_for_a_while() -> None:
    def speculator(first: float) -> Speculator:
        cost = CostTable(tokens=[0, 10], batches=[1], seconds=[[1.0, 1.0]], draft=[[first, 0.01]])
        made = make("hybrid", cost)
        made.begin("0", "p", PROMPT, 100)
        step(made, ["0"], [TEXT[:1]])
        made.end("0")
        return made

    dear, cheap = speculator(3.0), speculator(0.01)
    used: dict[str, list[bool]] = {"dear": [], "cheap": []}
    for iteration in range(10):
        for name, one in (("dear", dear), ("cheap", cheap)):
            one.learn(iteration, [])
            one.gate.probes = ()
            one.begin("0", "p", PROMPT, 100)
            used[name].append(one.plan(["0"]).passes is not None)
            one.end("0")
    assert used["dear"] == [False] * 8 + [True] + [False]
    assert all(used["cheap"])


@pytest.mark.parametrize("drafter", ["model", "suffix", "hybrid"])
def test_nothing_is_proposed_where_tokens_cost_as_much_as_steps(drafter) -> None:
    speculator = make(drafter, CostTable(tokens=[0, 10], batches=[1], seconds=[[0.0, 10.0]]))
    speculator.learn(0, [rollout()])
    speculator.gate.probes = ()
    speculator.begin("0", "p", PROMPT, 100)
    assert step(speculator, ["0"], [TEXT[:1]]) == [[]]


def test_acceptances_are_counted_by_drafter_class_and_position() -> None:
    speculator = make("hybrid", policy="unlimited")
    speculator.learn(0, [rollout(sample=s) for s in range(8)])
    speculator.begin("0", "p", PROMPT, 100)
    speculator.advance(["0"], [TEXT[:1]], [0], [0], 0.0)
    speculator.gate.probes = (1,)  # 4 tokens of the model, 4 behind them
    speculator.complete(speculator.plan(["0"]), [TEXT[1:5]])
    speculator.advance(["0"], [TEXT[1:8]], [8], [6], 0.0)
    stats = speculator.drain_stats()
    model, suffix = stats.drafters[MODEL], stats.drafters[SUFFIX]
    assert (model.steps, model.drafted, model.accepted) == (1, [1] * 4, [1] * 4)
    assert suffix.drafted == [0] * 4 + [1] * 4
    assert suffix.accepted == [0] * 4 + [1, 1, 0, 0]
    assert stats.classes["medium"].drafted == [1] * 8
    assert stats.classes["medium"].tau == 7
    assert speculator.drain_stats().steps == 0
    # What the scheduler cut off was not tried.
    speculator.complete(speculator.plan(["0"]), None)
    speculator.advance(["0"], [[99]], [2], [0], 0.0)
    assert speculator.drain_stats().drafters[SUFFIX].drafted == [1, 1, 0, 0, 0, 0, 0, 0]
    with pytest.raises(GuardStop, match="3 draft tokens were verified, proposed were 0"):
        speculator.advance(["0"], [[99]], [3], [0], 0.0)


def test_the_models_acceptance_is_learned_by_position_and_request() -> None:
    speculator = make("model")
    for own in ("good", "bad"):
        speculator.begin(own, own, PROMPT, 1000)
    for _ in range(40):
        plan = speculator.plan(["bad", "good"])
        drafts = speculator.complete(plan, [[5] * (plan.passes or 0)] * 2)
        tested = [len(d) for d in drafts]
        hits = [0, tested[1]]
        speculator.advance(["bad", "good"], [[1], [1] * (hits[1] + 1)], tested, hits, 0.0)
    requests = [speculator._requests[r] for r in ("bad", "good")]
    allowance = Allowance(limits=np.array([4, 4]), floors=np.zeros(2), weights=np.full(2, 0.5))
    paths, _ = speculator._model_paths(requests, allowance)
    assert paths[0, 0] < 0.15
    assert paths[1, 0] > 0.5


def test_the_order_of_a_batch_does_not_matter() -> None:
    """Ranks that are told the same decide the same."""
    found = []
    for order in (1, -1):
        speculator, rng = make("hybrid"), random.Random(0)
        speculator.gate.probes = range(2, 9)
        speculator.learn(0, [rollout(p, s, rng.choices(range(6), k=40)) for p in "ab" for s in range(3)])
        ids = ["0", "1", "2"]
        for i, own in enumerate(ids):
            speculator.begin(own, "ab"[i % 2], PROMPT, 60)
        drafts: list[dict[str, list[int]]] = []
        tokens = {own: [rng.randrange(6)] for own in ids}
        verified = {own: 0 for own in ids}
        for _ in range(12):
            batch = ids[::order]
            hits = [len(tokens[r]) - 1 for r in batch]
            speculator.advance(batch, [tokens[r] for r in batch], [verified[r] for r in batch], hits, 0.0)
            plan = speculator.plan(batch)
            out = speculator.complete(plan, [[3, 4, 3, 4][: plan.passes or 0]] * 3)
            drafts.append(dict(sorted(zip(batch, out))))
            for own, draft in sorted(zip(batch, out)):
                kept = rng.randint(0, len(draft))
                tokens[own], verified[own] = [*draft[:kept], rng.randrange(6)], len(draft)
        found.append((drafts, [(r.predicted, r.accepted) for _, r in sorted(speculator._requests.items())]))
    assert found[0] == found[1]


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(["fixed", "unlimited", "das", "das_closed", "price"]),
    drafter=st.sampled_from(["model", "suffix", "hybrid"]),
    rooms=st.lists(st.integers(2, 20), min_size=1, max_size=4),
    probes=st.sampled_from([(), (1,)]),
)
def test_no_draft_is_longer_than_what_may_come(policy, drafter, rooms, probes) -> None:
    speculator = make(drafter, CostTable.linear(1.0, 0.01), policy)
    speculator.learn(0, [rollout(sample=s) for s in range(4)])
    speculator.gate.probes = probes
    ids = [str(i) for i in range(len(rooms))]
    for own, room in zip(ids, rooms):
        speculator.begin(own, "p", PROMPT, room)
    for own, room, draft in zip(ids, rooms, step(speculator, ids, [TEXT[:1]] * len(ids))):
        assert len(draft) <= min(speculator.longest, room - 2)  # one token came, one comes anyway
        assert speculator.room(own) == room - 1


def test_state_is_plain_and_complete() -> None:
    one = make("hybrid")
    one.learn(0, [rollout(sample=s) for s in range(4)])
    one.gate.probes = ()
    one.begin("0", "p", PROMPT, 100)
    step(one, ["0"], [TEXT[:1]])
    one.end("0")
    state = one.state_dict()
    json.dumps(state, default=lambda array: {"array": np.asarray(array).tolist()})
    two = make("hybrid", CostTable.linear(2.0, 1.0))
    two.load_state_dict(copy.deepcopy(state))
    assert two.budget.state.cost == one.budget.state.cost
    two.gate.probes = ()
    for speculator in (one, two):
        speculator.begin("1", "p", PROMPT, 100)
    assert step(one, ["1"], [TEXT[:1]]) == step(two, ["1"], [TEXT[:1]]) == [TEXT[1:9]]
    assert two.drain_stats().window_bytes == one.drain_stats().window_bytes > 0
    assert two.suffix is not None
    assert two.suffix.generations("p") == [0]
    with pytest.raises(ValueError, match="requests are running"):
        two.load_state_dict(state)


def test_a_continuation_behind_given_tokens_is_the_one_after_them() -> None:
    rng = random.Random(1)
    for _ in range(30):
        texts = [rollout(sample=s, tokens=rng.choices(range(4), k=60)) for s in range(3)]
        given_tokens, begin = rng.choices(range(4), k=rng.randint(1, 5)), rng.choices(range(4), k=3)
        drafts = []
        for advance in (False, True):
            drafter = SuffixDrafter(max_draft=6)
            drafter.add_rollouts(0, texts)
            drafter.start("r", "p", [])
            drafter._release(int(drafter._requests.automata[0, 0]))  # only what is not its own
            drafter._release(int(drafter._requests.automata[0, 1]))
            drafter._requests.automata[0, :2] = -1
            drafter.advance(["r"], [begin])
            if advance:
                drafter.advance(["r"], [given_tokens])
                drafts.append(drafter.propose(["r"], [6]))
            else:
                before = drafter.propose(["r"], [6]).lists()
                drafts.append(drafter.extend(["r"], [given_tokens], [6]))
                assert drafter.propose(["r"], [6]).lists() == before  # nothing has moved
        assert drafts[0].lists() == drafts[1].lists()
        np.testing.assert_allclose(drafts[0].probs, drafts[1].probs, atol=1e-6)


def test_while_requests_wait_all_running_ones_count_alike() -> None:
    speculator = make("suffix", CostTable.linear(1.0, 0.1))
    seen, allow = [], speculator.budget.allow
    speculator.budget.allow = lambda s: seen.append(allow(s)) or seen[-1]
    speculator.set_queue_depth(3)
    for own, room in (("0", 10), ("1", 500)):
        speculator.begin(own, "p", PROMPT, room)
    speculator.lengths.observe([rollout(), rollout("long", tokens=TEXT * 9)])
    step(speculator, ["0", "1"], [[1], [1]])
    assert seen[-1].weights.tolist() == [0.5, 0.5]
    speculator.begin("2", "long", PROMPT, 500)
    step(speculator, ["0", "1", "2"], [[1, 1], [1, 1], [1]])
    assert seen[-1].weights[2] > 0.5


def test_an_unknown_problem_and_an_empty_history_are_no_trouble() -> None:
    speculator = make("suffix")
    speculator.begin("0", "never seen", [], 50)
    assert step(speculator, ["0"], [[7]]) == [[]]
    speculator.learn(0, [])
    assert step(speculator, ["0"], [[8]]) == [[]]
    assert speculator.plan([]).ids == []


def test_a_step_in_which_all_read_their_prompts_counts_nothing() -> None:
    speculator = make("model")
    assert speculator.plan([]).ids == []
    speculator.advance([], [], [], [], 1.0)  # was a division by zero: long prompts take several steps
    assert speculator.drain_stats().seconds == 0


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
def test_an_evaluation_teaches_nothing(drafter) -> None:
    speculator = make(drafter)
    speculator.learn(0, [rollout(sample=s) for s in range(4)])
    before = copy.deepcopy(speculator.state_dict())
    with speculator.frozen_stats():
        speculator.begin("0", "p", PROMPT, 100)
        step(speculator, ["0"], [TEXT[:1]])
        speculator.advance(["0"], [TEXT[1:2]], [4], [0], 1.0)
        speculator.end("0")
        assert speculator.state_dict()["steps"] != before["steps"]
    np.testing.assert_equal(speculator.state_dict(), before)
    assert speculator.drain_stats().steps == 0


def test_a_draft_that_is_off_is_not_run() -> None:
    speculator = make("model", policy="off")
    speculator.begin("0", "p", PROMPT, 100)
    speculator.advance(["0"], [TEXT[:1]], [0], [0], 0.0)
    assert speculator.plan(["0"]).passes is None


def test_a_draft_that_is_not_worth_it_rests_within_an_iteration_too() -> None:
    cost = CostTable(tokens=[0, 10], batches=[1], seconds=[[1.0, 1.0]], draft=[[3.0, 0.01]])
    speculator = make("hybrid", cost)
    speculator.gate.probes = PROBES
    speculator.begin("0", "p", PROMPT, 100)
    used = []
    for _ in range(40):
        step(speculator, ["0"], [[7]])
        used.append(speculator.gate.is_open)
    assert used == [True] * (PATIENCE - 1) + [False] * (41 - PATIENCE)
    speculator.end("0")
    for iteration in range(REST):
        speculator.learn(iteration, [])
        assert not speculator.gate.is_open
    speculator.learn(REST, [])
    assert speculator.gate.is_open


def test_a_plan_asks_for_chains_only_of_a_model_that_runs() -> None:
    """Also in the step whose own estimate makes it one too many."""
    cost = CostTable(tokens=[0, 10], batches=[1], seconds=[[1.0, 1.0]], draft=[[0.9, 0.0]])
    speculator = make("model", cost)
    speculator.begin("0", "p", PROMPT, 1000)
    hits, verified, plans = 4, 0, []
    while not plans or plans[-1].passes is not None:
        speculator.advance(["0"], [[7] * (min(hits, verified) + 1)], [verified], [min(hits, verified)], 0.0)
        plans.append(speculator.plan(["0"]))
        assert plans[-1].passes is not None or not plans[-1].chains.any()
        (draft,) = speculator.complete(plans[-1], [[99] * (plans[-1].passes or 0)])
        verified = len(draft)
        hits = 4 if len(plans) < PATIENCE else 0
    assert len(plans) > PATIENCE + 2
    assert plans[-2].chains.any()


def test_a_draft_that_pays_in_the_tail_only_pauses_before_it(caplog) -> None:
    """It is judged by batches about as large, and rests only if it was not worth its time all in all."""
    cost = CostTable(
        tokens=[0, 10], batches=[1, 64], seconds=[[1.0, 1.0]] * 2, draft=[[0.01, 0.01], [3.0, 0.3]]
    )
    speculator = make("model", cost)
    lengths = {f"{i:02}": 40 + i for i in range(63)} | {"63": 600}
    for own in lengths:
        speculator.begin(own, "p", PROMPT, 1000)
    used: dict[int, list[bool]] = {}
    for done in range(1, 600):
        running = [own for own, length in lengths.items() if length > done]
        for own in [own for own, length in lengths.items() if length == done]:
            speculator.end(own)
        step(speculator, running, [[7]] * len(running))
        used.setdefault(len(running), []).append(speculator.gate.is_open)
    assert used[64] == [True] * (PATIENCE - 1) + [False] * (40 - PATIENCE)
    assert not any(any(used[n]) for n in range(33, 64))
    assert all(used[32])  # half of them are done
    assert used[1] == [True] * 498
    speculator.end("63")
    speculator.learn(0, [])
    assert speculator.gate.is_open
    assert "it rests" not in caplog.text


def test_a_resting_draft_is_said(caplog) -> None:
    speculator = make("model")
    speculator.gate.worth = -1.0  # an iteration's gains less its costs
    speculator.learn(0, [])
    assert "the draft model costs more time than it saves" in caplog.text
    speculator.begin("0", "p", PROMPT, 100)
    speculator.advance(["0"], [TEXT[:1]], [0], [0], 0.0)
    assert speculator.plan(["0"]).passes is None
