"""Draft budgets: the formulas meet what they were derived from, and limits are never exceeded."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspec.config.schema import Budget as BudgetConfig
from torchspec.errors import ConfigError
from torchspec.speculation.budgets.base import BudgetRule, BudgetState, Step
from torchspec.speculation.budgets.das_closed import closed_budgets, closed_form
from torchspec.speculation.budgets.price import criticality, price_floors
from torchspec.speculation.budgets.registry import RULES, build_rule
from torchspec.speculation.cost_table import CostTable
from torchspec.speculation.survival import LONG, MEDIUM, SHORT, Survival

COST = CostTable.linear(0.008, 0.0246e-3)


def rule(name: str, cost: CostTable = COST, max_draft: int = 32, **settings) -> BudgetRule:
    return build_rule(BudgetConfig(rule=name, **settings), cost, max_draft)


def step(remaining, generated=None, room=None, expected=None) -> Step:
    count = len(remaining)
    return Step(
        generated=np.zeros(count, int) if generated is None else np.array(generated, int),
        room=np.full(count, 10_000) if room is None else np.array(room, int),
        remaining=np.array(remaining, float),
        expected=np.full(count, np.nan) if expected is None else np.array(expected, float),
    )


def passes_needed(length, efficiency, capacity, proposed):
    """Forward passes of a request that proposes `proposed` tokens: DAS, equation 4."""
    return length * (1 - capacity + capacity * np.exp(-efficiency * proposed / length))


def test_the_closed_form_meets_its_constraint_and_the_printed_one_does_not():
    length, efficiency, capacity, rounds = np.array([8000.0]), np.array([0.9]), np.array([0.6]), 5000.0
    proposed = closed_budgets(length, efficiency, capacity, rounds)
    assert proposed[0] == pytest.approx(8718, abs=1)
    assert passes_needed(length, efficiency, capacity, proposed)[0] == pytest.approx(rounds)
    printed = -(length / efficiency) * np.log(1 - capacity * (1 - rounds / length))
    assert printed[0] == pytest.approx(2266, abs=1)
    assert passes_needed(length, efficiency, capacity, printed)[0] == pytest.approx(6920, abs=1)


@settings(deadline=None)
@given(
    lengths=st.lists(st.floats(10, 20_000), min_size=1, max_size=12),
    efficiency=st.floats(0.05, 1.2),
    capacity=st.floats(0.2, 1.0),
    ratio=st.floats(1, 5000),
)
def test_the_closed_form_is_the_cheapest_number_of_passes(lengths, efficiency, capacity, ratio):
    length = np.array(lengths)
    a, k = np.full(len(length), efficiency), np.full(len(length), capacity)
    proposed, rounds = closed_form(length, a, k, ratio, 1.0)

    def seconds(n: float) -> float:
        p = closed_budgets(length, a, k, n)
        own = np.where(p > 0, passes_needed(length, a, k, p), length)
        return ratio * n + float((own + p).sum())

    assert (passes_needed(length, a, k, proposed) <= rounds * (1 + 1e-6) + 1e-6).all()
    assert (proposed >= 0).all()
    floor = (length * (1 - k)).max()
    others = floor + (length.max() - floor) * np.linspace(1e-3, 1, 200)
    assert seconds(rounds) <= min(seconds(n) for n in others) * (1 + 1e-6)


def test_price_floors_have_fixed_thresholds_as_limits():
    count = 16
    uniform = rule("price", COST, focus=0.0).allow(step(np.arange(1, 17)))
    base, per_token = COST(count, count), COST.marginal(count, count)
    np.testing.assert_allclose(uniform.floors, count * per_token / base)  # equally critical requests
    alone = rule("price", COST).allow(step([50.0]))
    assert alone.floors[0] == pytest.approx(per_token / COST(1, 1))
    free = rule("price", CostTable.linear(0.008, 0.0)).allow(step([1.0, 9.0]))
    assert free.floors.tolist() == [0.0, 0.0]
    assert price_floors(np.array([1e-3, 0.0]), 1e9).tolist() == pytest.approx([1, 1])
    assert price_floors(np.array([0.0]), 1e-3).tolist() == [1.0]


def rate_of(budget: BudgetRule, chances: np.ndarray) -> float:
    """Tokens a second of steps in which each token of a request's draft has the chance `chances` [steps, B]."""
    batch, time, tokens = chances.shape[1], 0.0, 0.0
    for row in chances:
        allowed = budget.allow(step([50.0] * batch))
        paths = row[:, None] ** np.arange(1, 33)
        kept = (paths >= allowed.floors[:, None]) & (np.arange(32) < allowed.limits[:, None])
        emitted, drafted = batch + float(paths[kept].sum()), int(kept.sum())
        seconds = budget.state.cost(batch + drafted, batch)
        budget.state.observe(drafted, 0, batch, budget.state.cost(batch, batch) * emitted / batch, seconds)
        time, tokens = time + seconds, tokens + emitted
    return tokens / time


class FixedFloor(BudgetRule):
    floor = 0.0

    def floors(self, weights: np.ndarray) -> np.ndarray:
        return np.full(len(weights), self.floor)


@pytest.mark.parametrize("per_token", [1e-5, 1e-4, 5e-4])
def test_price_finds_the_floor_with_most_tokens_a_second(per_token):
    """What a token is worth is what it costs to make one in the steps as they are, drafts included."""
    cost = CostTable.linear(8e-3, per_token)
    chances = np.random.default_rng(0).beta(1.0, 0.7, (600, 4))
    own = rate_of(rule("price", cost, focus=0.0), chances)

    rates = []
    for floor in np.geomspace(1e-3, 0.9, 40):
        fixed = FixedFloor(BudgetConfig(), BudgetState(cost, Survival(256, 1024)), 32)
        fixed.floor = floor
        rates.append(rate_of(fixed, chances))
    assert own > 0.998 * max(rates)


def test_a_speed_up_prices_batches_about_as_large_only():
    """A tail decodes several times faster with drafts; a full batch's plain tokens stay as dear as they are."""
    budget, full, tail = rule("price", COST), np.full(64, 1 / 64), np.full(3, 1 / 3)
    before = budget.state.prices(full)
    for _ in range(400):
        budget.state.observe(16, 12, 2, 4 * COST(2, 2), COST(18, 2))
    assert budget.state.prices(full).tolist() == before.tolist()
    speed_up = 4 * COST(2, 2) / COST(18, 2)
    expected = COST(3, 3) / 3 / speed_up - COST.marginal(19, 3)
    tail_prices = budget.state.prices(tail)  # 2 and 3 requests are about as many
    np.testing.assert_allclose(tail_prices, expected, rtol=0.02)


def test_price_spends_on_the_one_that_ends_last():
    allowance = rule("price", COST, focus=1.0).allow(step([10, 10, 4000]))
    assert allowance.weights.sum() == pytest.approx(1)
    assert allowance.weights[2] > 0.9
    assert allowance.floors[2] < 0.01 < 0.05 < allowance.floors[0]
    np.testing.assert_allclose(criticality(np.array([5.0, 5.0])), [0.5, 0.5])


def test_a_proposal_pays_off_exactly_above_its_floor():
    """Expected net value of one more draft token is lambda p - c (1 - p)."""
    price, per_token = 3e-3, 1e-4
    floor = price_floors(np.array([price]), per_token)[0]
    for p in (floor - 1e-6, floor + 1e-6):
        assert (price * p - per_token * (1 - p) > 0) == (p > floor)


@settings(deadline=None)
@given(
    policy=st.sampled_from(sorted(RULES)),
    rooms=st.lists(st.integers(0, 40), max_size=8),
    max_draft=st.integers(1, 32),
    data=st.data(),
)
def test_no_request_exceeds_its_budget_or_its_room(policy, rooms, max_draft, data):
    count = len(rooms)
    numbers = st.lists(st.integers(0, 5000), min_size=count, max_size=count)
    state = step(data.draw(numbers), data.draw(numbers), rooms, data.draw(numbers))
    budget = rule(policy, COST, max_draft=max_draft, fixed_tokens=40)
    for length in data.draw(numbers):
        budget.state.survival.observe(float(length), length)
    allowance = budget.allow(state)
    assert len(allowance.limits) == len(allowance.floors) == count
    assert ((allowance.limits >= 0) & (allowance.limits <= max_draft)).all()
    assert (
        allowance.limits <= np.maximum(np.array(rooms, int) - 1, 0)
    ).all()  # the bonus token needs room too
    assert ((allowance.floors >= 0) & (allowance.floors <= 1)).all()
    if policy == "off":
        assert not allowance.limits.any()


def test_das_classes_follow_history_and_are_upgraded_at_run_time():
    survival = Survival(256, 1024)
    assert survival.class_of(np.array([0, 255, 256, 1023, 1024, np.nan])).tolist() == [
        SHORT, SHORT, MEDIUM, MEDIUM, LONG, MEDIUM,
    ]  # fmt: skip
    nothing_known = survival.classes(np.array([100.0, np.nan]), np.array([0, 0]))
    assert nothing_known.tolist() == [SHORT, MEDIUM]
    for _ in range(8):
        survival.observe(100.0, 120)
    for _ in range(3):
        survival.observe(100.0, 4000)
    lengths = np.array([0, 100, 128, 200, 3999, 9999])
    found = survival.classes(np.full(6, 100.0), lengths)
    assert found.tolist() == [SHORT, SHORT, LONG, LONG, LONG, LONG]  # who gets past 128 will be long
    limits = (
        rule("das", COST, class_tokens=[0, 8, 24]).allow(step([1] * 3, [0, 300, 2000], None, [9] * 3)).limits
    )
    assert limits.tolist() == [0, 8, 24]


def test_closed_budget_favours_long_requests():
    budget = rule("das_closed", COST)
    budget.state.observe(1000, 700)
    limits = budget.allow(step([5, 400, 4000])).limits
    assert limits[0] <= limits[1] <= limits[2]
    assert limits[2] > 0 == limits[0]
    dear = rule("das_closed", CostTable.linear(1e-9, 1.0))
    assert not dear.allow(step([5, 400, 4000])).limits.any()


def test_a_closed_budget_recovers_from_a_bad_start():
    budget, state = rule("das_closed", CostTable.linear(5e-3, 1e-4)), step([48] * 6)
    assert budget.allow(state).limits.all()
    for _ in range(100):
        budget.state.observe(100, 1)
    assert not budget.allow(state).limits.any()
    for _ in range(500):
        budget.state.observe(0, 0)
    assert budget.allow(state).limits.all()


def test_the_estimated_gain_is_the_ratio_of_token_rates():
    budget = rule("fixed", COST)
    allowance = budget.allow(step([9, 9]))
    gain = budget.state.gain(allowance.weights, np.array([1.5, 0.5]), drafted=6)
    assert gain == pytest.approx((2 + 2.0) / 2 * COST(2, 2) / COST(8, 2))
    assert budget.state.gain(allowance.weights, np.array([0.0, 0.0]), drafted=6) < 1
    assert budget.state.gain(allowance.weights, np.array([1.5, 0.5]), 6, draft_seconds=1.0) < 1


def test_cost_tables_interpolate_and_are_saved(tmp_path: Path):
    table = CostTable(tokens=[1, 8, 64], batches=[1, 9], seconds=[[1.0, 1.0, 2.0], [3.0, 3.0, 6.0]])
    assert table(1, 1) == table(8, 1) == 1.0
    assert table(36, 1) == pytest.approx(1.5)
    assert table(36, 5) == pytest.approx(3.0)
    assert table(120, 1) == pytest.approx(3.0)  # goes on as between the last two
    assert table(8, 99) == 3.0
    assert table.marginal(4, 1) == 0.0
    assert table.marginal(8, 1) == pytest.approx(1 / 56)
    table.save(tmp_path / "cost.json")
    assert CostTable.load(tmp_path / "cost.json") == table
    for text in ("{", "[]", '{"tokens": [1]}', '{"tokens": [2, 1], "batches": [1], "seconds": [[1, 2]]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            CostTable.load(tmp_path / "bad.json")
    noisy = CostTable(tokens=[1, 2], batches=[1], seconds=[[2.0, 1.9]])
    assert noisy.marginal(1, 1) == 0.0


def test_the_draft_models_time_is_part_of_the_table(tmp_path: Path):
    table = CostTable(
        tokens=[0, 10], batches=[1, 3], seconds=[[1, 2], [1, 2]], draft=[[0.5, 0.1], [0.7, 0.3]]
    )
    assert table.drafting(0, 1) == pytest.approx(0.5)
    assert table.drafting(2, 2) == pytest.approx(0.6 + 2 * 0.2)
    assert CostTable.linear(1, 1).drafting(3, 1) == 0
    table.save(tmp_path / "cost.json")
    assert CostTable.load(tmp_path / "cost.json") == table
    with pytest.raises(ValueError, match="two times of the draft"):
        CostTable(tokens=[0, 10], batches=[1], seconds=[[1, 2]], draft=[[0.5]])


def test_a_budgets_state_is_kept():
    one, two = (rule("das", CostTable.linear(1, slope), short_below=10, long_from=20) for slope in (0.1, 0.3))
    one.state.survival.observe(5.0, 300)
    one.state.observe(7, 3, 4, 3.0, 2.0)
    two.state.load_state_dict(one.state.state_dict())
    assert two.state.per_token(4) == one.state.per_token(4)
    assert two.state.prices(np.full(4, 0.25)).tolist() == one.state.prices(np.full(4, 0.25)).tolist()
    assert two.state.survival.counts.tolist() == one.state.survival.counts.tolist()


def test_an_unknown_rule_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"budget\.rule = 'prize' is not allowed; did you mean 'price'\? one of: off"
    ):
        rule("prize")
    with pytest.raises(ConfigError, match="one of: off, fixed"):
        rule("???")
