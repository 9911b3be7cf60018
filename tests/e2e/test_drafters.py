"""Suffix, hybrid and budgets inside vLLM: what is sampled stays the policy's, and the counts are right.

One engine with a draft and one without; each test lets a Speculator of its own draft.
"""

import copy
import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from checkpoints import END_TOKEN, engine_config, requests
from test_vllm_engine import chains, oracle_logprobs

from torchspec.errors import ConfigError
from torchspec.models.logprobs import chunk_logprobs
from torchspec.records import SamplingLaw, SpecStats
from torchspec.rollout.engine import Request, Sampling
from torchspec.rollout.vllm.engine import VllmEngine
from torchspec.speculation.cost_table import CostTable
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.plan import Choice
from torchspec.speculation.speculator import Speculator

pytestmark = pytest.mark.e2e

GREEDY = Sampling(temperature=0.0, max_new_tokens=48)
DRAFTERS = ("model", "suffix", "hybrid")
# Decode-bound: a step takes 5 ms, a token 20 us, the draft 0.5 ms and 0.2 ms a token.
COST = CostTable(tokens=[0, 4096], batches=[1], seconds=[[5e-3, 87e-3]], draft=[[5e-4, 2e-4]])
FREE_DRAFT = dataclasses.replace(COST, draft=[[0.0, 0.0]])  # a random draft's passes are worth nothing else


def config_of(drafter, policy="price", **rollout):
    config = engine_config(**rollout)
    config.rollout.drafter = drafter
    config.budget.rule = policy
    config.suffix.max_draft = 8
    return config


def speculator_of(drafter, policy="price", cost=COST):
    return Speculator(config_of(drafter, policy), LengthStats(default=48), cost)


@pytest.fixture(scope="module")
def engine(folders, tmp_path_factory):
    """Can run every drafter; priced by a table of its own, so that every run decides alike."""
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    COST.save(path)
    config = config_of("hybrid")
    config.budget.cost_table = str(path)
    engine = VllmEngine(config, folders["policy"], folders["draft"], seed=0, device_type="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine):
    """Rollouts of the same engine while nobody drafts."""

    def generate(batch, sampling):
        engine.speculate(None)
        return engine.generate(batch, sampling)

    return generate


@pytest.fixture(scope="module")
def oracle(folders):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folders["policy"], dtype=torch.float32).eval()


def check_counts(rollouts, stats):
    """The engine's per-request counts and the speculator's per-drafter counts tell the same story."""
    total = SpecStats.total((r.spec for r in rollouts), 8)
    by_class = SpecStats.total(stats.classes.values(), 8)
    assert (by_class.steps, by_class.drafted, by_class.accepted) == (
        total.steps,
        total.drafted,
        total.accepted,
    )
    by_drafter = SpecStats.total(stats.drafters.values(), 8)
    assert (by_drafter.drafted, by_drafter.accepted) == (total.drafted, total.accepted)
    for rollout in rollouts:
        spec = rollout.spec
        assert all(a <= d for a, d in zip(spec.accepted, spec.drafted))
        # No draft is longer than what may still come, so nothing accepted lies behind max_new_tokens.
        assert 1 + spec.steps + sum(spec.accepted) <= len(rollout.tokens) + (rollout.finish == "stop") * 8 + 1


@pytest.mark.parametrize("policy", ["price", "unlimited"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_the_plain_ones_in_every_epoch(engine, plain, drafter, policy):
    batch = requests(10, seed=0, samples=2)
    expected = plain(batch, GREEDY)
    assert all(r.spec.steps == 0 for r in expected)
    speculator = speculator_of(drafter, policy)
    engine.speculate(speculator)
    for epoch in range(3):
        found = engine.generate(batch, GREEDY)
        assert [(r.tokens, r.finish) for r in found] == [(r.tokens, r.finish) for r in expected]
        stats = speculator.drain_stats()
        check_counts(found, stats)
        speculator.lengths.observe(found)
        speculator.learn(epoch, found)
    if drafter != "model":  # by now everything was said before
        assert SpecStats.total((r.spec for r in found), 8).tau > 5
        assert stats.window_bytes > 0
    torch.testing.assert_close(
        torch.tensor([p for r in found for p in r.logprobs]),
        torch.tensor([p for r in expected for p in r.logprobs]),
        rtol=0,
        atol=1e-4,
    )


class Mixing(Speculator):
    """Chains of 0, 1 and 2 tokens of the draft in every batch, each with what the suffix drafter has behind it."""

    def _choose(self, weights, drafts, saved, paths, need):
        chains = np.minimum(need, np.arange(len(need)) % 3)
        return Choice(int(chains.max(initial=0)), True, chains, saved)


def law_of_short_responses(engine, oracle, drafter, count, policy="unlimited", length=4, top_k=3):
    """p-value of `count` short responses to one prompt, drafted for by a drafter with a history of them."""
    prompt = requests(1, seed=9)[0].prompt_tokens
    with torch.no_grad():
        law = chains(oracle, prompt, top_k=top_k, length=length)
    sampling = Sampling(temperature=1.0, top_k=top_k, max_new_tokens=length)
    speculator = speculator_of(drafter, policy, FREE_DRAFT)
    if drafter == "hybrid" and policy == "unlimited":
        speculator = Mixing(config_of(drafter, policy), LengthStats(default=48))
    engine.speculate(speculator)
    history = engine.generate([Request(problem_id="p", prompt_tokens=prompt, samples=64)], sampling)
    speculator.learn(0, history)
    speculator.drain_stats()
    rollouts = engine.generate([Request(problem_id="p", prompt_tokens=prompt, samples=count)], sampling)
    stats = speculator.drain_stats()
    seen = Counter(tuple(r.tokens) for r in rollouts)
    assert set(seen) <= set(law)
    # Each of them had its share; a price that a random draft can pay has few.
    for own in stats.drafters.values():
        assert sum(own.accepted if policy == "unlimited" else own.drafted) > count / 50, stats.drafters
    cells = [(seen[c], count * p) for c, p in law.items() if count * p >= 5]
    rest = count - sum(n for n, _ in cells), count - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    assert len(cells) > 40
    statistic = sum((n - expected) ** 2 / expected for n, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()


@pytest.mark.parametrize("drafter", ["suffix", "hybrid"])
def test_sampling_follows_the_exact_law(engine, oracle, drafter):
    assert law_of_short_responses(engine, oracle, drafter, count=3000) > 0.01


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampling_follows_the_exact_law_where_the_price_chooses(engine, oracle, drafter):
    assert law_of_short_responses(engine, oracle, drafter, count=3000, policy="price") > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_many_samples_follow_the_exact_law(engine, oracle, drafter):
    assert law_of_short_responses(engine, oracle, drafter, count=50_000) > 0.01


@pytest.mark.parametrize("drafter", ["suffix", "hybrid"])
def test_logprobs_are_the_rescored_ones(engine, oracle, drafter):
    speculator = speculator_of(drafter, "unlimited")
    if drafter == "hybrid":
        speculator = Mixing(config_of(drafter, "unlimited"), LengthStats(default=48))
    engine.speculate(speculator)
    batch = requests(6, seed=3, samples=4)
    for epoch in range(2):
        rollouts = engine.generate(batch, Sampling(temperature=0.7, max_new_tokens=40))
        speculator.learn(epoch, rollouts)
    assert all(sum(stats.accepted) > 10 for stats in speculator.drain_stats().drafters.values())
    for rollout in rollouts:
        expected = oracle_logprobs(oracle, rollout, 0.7)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "law",
    [
        SamplingLaw(temperature=0.9, top_p=0.8),
        SamplingLaw(temperature=1.2, top_k=6),
        SamplingLaw(top_p=0.9, top_k=12),
    ],
    ids=["top_p", "top_k", "both"],
)
@torch.no_grad()
def test_importance_weights_are_one_under_a_truncated_law(engine, oracle, drafter, law):
    """The trainer's log-probabilities of what each drafter led to are the engine's."""
    speculator = speculator_of(drafter, "unlimited")
    engine.speculate(speculator)
    batch = requests(4, seed=5, samples=3)
    for epoch in range(2):
        rollouts = engine.generate(batch, Sampling(**dataclasses.asdict(law), max_new_tokens=32))
        speculator.learn(epoch, rollouts)
    assert sum(sum(stats.drafted) for stats in speculator.drain_stats().drafters.values()) > 10
    for rollout in rollouts:
        tokens = torch.tensor(rollout.prompt_tokens + rollout.tokens)
        start = len(rollout.prompt_tokens)
        hidden = oracle.model(tokens[None]).last_hidden_state[0, start - 1 : -1]
        found, _ = chunk_logprobs(hidden, oracle.lm_head.weight, tokens[start:], law)
        weights = (found - torch.tensor(rollout.logprobs)).exp()
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-4)


def test_hybrid_skips_the_drafts_passes_and_extends_its_chains(engine):
    batch = requests(8, seed=4)
    speculator = speculator_of("hybrid")
    speculator.gate.probes = ()
    engine.speculate(speculator)
    passes, plans = [], speculator.plan

    def plan(ids):
        made = plans(ids)
        passes.append(made.passes)
        return made

    speculator.plan = plan
    first = engine.generate(batch, GREEDY)
    cold, passes[:] = list(passes), []
    speculator.learn(0, first)
    engine.generate(batch, GREEDY)
    assert max(cold) > 0
    # Everything was said before: the draft model proposes next to nothing.
    assert sum(map(bool, passes)) <= len(passes) / 4


def test_the_suffix_drafter_goes_on_behind_a_chain(engine, plain):
    batch = requests(9, seed=4)
    expected = plain(batch, GREEDY)
    speculator = Mixing(config_of("hybrid", "unlimited"), LengthStats(default=48))
    engine.speculate(speculator)
    speculator.learn(0, expected)
    found = engine.generate(batch, GREEDY)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    stats = speculator.drain_stats()
    check_counts(found, stats)
    suffix = stats.drafters["suffix"]
    assert suffix.drafted[0] < suffix.drafted[1] < suffix.drafted[2]
    assert suffix.accepted[2] > 0


def test_chains_in_the_hybrid_are_those_of_the_draft_alone(engine):
    """Its KV cache is complete although other drafts were verified: the greedy chains are equal."""
    batch, found = requests(6, seed=5), {}
    for drafter in ("model", "hybrid"):
        speculator = speculator_of(drafter, "unlimited")
        engine.speculate(speculator)
        chains_of: dict = found.setdefault(drafter, {})
        completes = speculator.complete

        def complete(plan, chains, chains_of=chains_of, completes=completes, speculator=speculator):
            for own, chain in zip(plan.ids, chains):
                request = speculator._requests[own]
                chains_of[request.problem_id, request.generated] = list(chain)
            return completes(plan, chains)

        speculator.complete = complete
        for epoch in range(2):
            rollouts = engine.generate(batch, GREEDY)
            speculator.learn(epoch, rollouts)
    common = [key for key in found["hybrid"] if key in found["model"]]
    assert len(common) > 30
    for key in common:
        n = min(len(found["hybrid"][key]), len(found["model"][key]))
        assert found["hybrid"][key][:n] == found["model"][key][:n], key


@pytest.mark.parametrize("drafter", ["suffix", "hybrid"])
def test_a_response_ends_at_max_len_inside_a_draft(engine, plain, drafter):
    batch = requests(3, seed=11, shortest=200, longest=240)
    endless = Sampling(temperature=0.0, max_new_tokens=1000)
    expected = plain(batch, endless)
    assert any(len(r.prompt_tokens) + len(r.tokens) == 256 for r in expected)
    speculator = speculator_of(drafter, "unlimited")
    engine.speculate(speculator)
    for epoch in range(2):
        found = engine.generate(batch, endless)
        assert [(r.tokens, r.finish) for r in found] == [(r.tokens, r.finish) for r in expected]
        check_counts(found, speculator.drain_stats())
        speculator.learn(epoch, found)


def test_an_end_token_inside_a_draft_ends_the_response(engine, plain):
    batch = requests(60, seed=12)
    expected = plain(batch, GREEDY)
    ended = [r for r in expected if r.finish == "stop" and len(r.tokens) > 4]
    assert ended
    speculator = speculator_of("suffix", "unlimited")
    engine.speculate(speculator)
    # A history in which the end token is followed by more, as no history of the engine's would have it.
    spoiled = [dataclasses.replace(r, tokens=[*r.tokens, 7, 8, 9, 7, 8, 9]) for r in ended]
    speculator.learn(0, spoiled)
    found = {r.problem_id: r for r in engine.generate(batch, GREEDY)}
    for rollout in ended:
        again = found[rollout.problem_id]
        assert again.tokens == rollout.tokens
        assert again.tokens[-1] == END_TOKEN


def test_requests_that_are_preempted_go_on(folders):
    """A KV cache for two sequences, three requests of many blocks: some are thrown out and begin again."""
    config = config_of("hybrid", "unlimited", kv_cache_gb=0.0026)
    engine = VllmEngine(config, folders["policy"], folders["draft"], seed=0, device_type="cpu")
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, []

    def counting(*args, **named):
        count.append(1)
        return preempt(*args, **named)

    scheduler._preempt_request = counting
    batch = requests(6, seed=13, shortest=100, longest=120)
    sampling = Sampling(temperature=0.0, max_new_tokens=130)
    found = [engine.generate(batch, sampling) for _ in range(2)]
    speculator = engine.speculator
    engine.close()
    assert count
    single = VllmEngine(engine_config(), folders["policy"], None, seed=0, device_type="cpu")
    expected = single.generate(batch, sampling)
    single.close()
    for rollouts in found:
        assert [r.tokens for r in rollouts] == [r.tokens for r in expected]
    check_counts([r for rollouts in found for r in rollouts], speculator.drain_stats())


def test_new_weights_between_epochs(engine, folders):
    """The suffix history outlives a refit: it is only a guess. Greedy tokens are the new policy's."""
    from safetensors.torch import load_file

    def weights(name):
        return list(load_file(folders[name] / "model.safetensors").items())

    batch = requests(6, seed=16)
    speculator = speculator_of("hybrid", "unlimited")
    engine.speculate(speculator)
    old = engine.generate(batch, GREEDY)
    speculator.learn(0, old)
    engine.update(weights("policy2"), None, policy_version=1, draft_version=0)
    new = engine.generate(batch, GREEDY)
    engine.speculate(None)
    plain = engine.generate(batch, GREEDY)
    engine.update(weights("policy"), None, policy_version=2, draft_version=0)
    assert [r.tokens for r in new] == [r.tokens for r in plain]
    assert [r.tokens for r in new] != [r.tokens for r in old]


@pytest.mark.parametrize("policy", ["off", "fixed", "das", "das_closed"])
def test_every_budget_keeps_its_limit(engine, plain, policy):
    batch = requests(6, seed=17)
    expected = plain(batch, GREEDY)
    config = config_of("hybrid", policy)
    config.budget.fixed_tokens = 2
    config.budget.short_below, config.budget.long_from = 20, 40
    config.budget.class_tokens = [0, 3, 5]
    speculator = Speculator(config, LengthStats(default=48), COST)
    engine.speculate(speculator)
    speculator.learn(0, expected)
    for epoch in range(1, 3):
        found = engine.generate(batch, GREEDY)
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        speculator.lengths.observe(found)
        speculator.learn(epoch, found)
    drafted = SpecStats.total((r.spec for r in found), 8).drafted
    most = {"off": 0, "fixed": 2, "das": 5, "das_closed": 8}[policy]
    assert not any(drafted[most:])
    assert policy == "off" or drafted[0]


def check_no_placeholders(engine):
    """A request that joins with one token, its others being cached: vLLM would pad it with K tokens -1."""
    (prompt,) = requests(1, seed=14, shortest=129, longest=129)
    expected = engine.generate([prompt], GREEDY)[0].tokens
    before = engine.counters.cached_tokens
    engine.speculator.drain_stats()
    rollouts = engine.generate([dataclasses.replace(prompt, samples=3)], GREEDY)
    assert engine.counters.cached_tokens - before == 3 * 128
    assert all(r.tokens == expected for r in rollouts)
    check_counts(rollouts, engine.speculator.drain_stats())


def test_a_suffix_engine_measures_its_own_costs(folders):
    """No draft model at all: the table is measured, a state travels, decisions repeat."""
    config = config_of("suffix", max_num_seqs=8)
    config.draft.enabled = False
    engine = VllmEngine(config, folders["policy"], None, seed=0, device_type="cpu")
    assert engine.cost.batches == [1, 4, 8]
    assert engine.cost.draft == []
    assert all(np.diff(row).min() >= 0 for row in engine.cost.seconds)
    check_no_placeholders(engine)
    batch = requests(6, seed=18)
    first = engine.generate(batch, GREEDY)
    engine.learn(0, first)
    state = copy.deepcopy(engine.state_dict())
    again = [engine.generate(batch, GREEDY)]
    engine.speculate(Speculator(config, LengthStats(default=48), engine.cost))
    engine.load_state_dict(state)
    again.append(engine.generate(batch, GREEDY))
    engine.close()
    assert [r.tokens for r in again[0]] == [r.tokens for r in first]
    assert again[0] == again[1]  # drafts too
    assert SpecStats.total((r.spec for r in again[0]), 8).tau > 4


def test_drafters_that_cannot_be_are_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="needs a draft checkpoint"):
        VllmEngine(config_of("hybrid"), folders["policy"], None, seed=0, device_type="cpu")
    with pytest.raises(ConfigError, match="no use for a draft"):
        VllmEngine(config_of("suffix"), folders["policy"], folders["draft"], seed=0, device_type="cpu")
    config = config_of("suffix")
    config.budget.cost_table = str(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="not a cost table"):
        VllmEngine(config, folders["policy"], None, seed=0, device_type="cpu")
