"""Replaying recorded rollouts: every token is accounted for, acceptance has the verifier's law, bad input is told."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from torchspec.commands.replay import replay, replay_command
from torchspec.config.schema import Budget as BudgetConfig
from torchspec.errors import ConfigError
from torchspec.records import Rollout, SpecStats
from torchspec.rollout.files import read_rollouts, write_rollouts
from torchspec.speculation.budgets.base import BudgetRule, BudgetState
from torchspec.speculation.budgets.registry import build_rule
from torchspec.speculation.budgets.survival import Survival
from torchspec.speculation.cost_table import CostTable
from torchspec.speculation.suffix.drafter import Drafts, SuffixDrafter

ROOT = Path(__file__).parents[2]
COST = CostTable.linear(0.008, 0.0246e-3)


def rule(name: str, cost: CostTable = COST, max_draft: int = 32, **settings) -> BudgetRule:
    return build_rule(BudgetConfig(rule=name, **settings), cost, max_draft)


def rollout(tokens: list[int], problem: str = "p", sample: int = 0, version: int = 0, **fields) -> Rollout:
    defaults = dict(logprobs=[-0.5] * len(tokens), finish="stop", draft_version=0)
    return Rollout(
        problem_id=problem,
        sample=sample,
        prompt_tokens=[1, 2],
        tokens=tokens,
        policy_version=version,
        **{**defaults, **fields},
    )


class Scripted:
    """Proposes the same tokens to everybody and writes down what it is told."""

    def __init__(self, draft: list[int]) -> None:
        self.draft = draft
        self.texts: dict[str, list[int]] = {}
        self.finished: list[list[int]] = []

    def begin_iteration(self, iteration: int) -> None: ...

    def add_rollouts(self, iteration: int, rollouts) -> None: ...

    def start(self, request_id: str, problem_id: str | None, prompt_tokens) -> None:
        self.texts[request_id] = []

    def stop(self, request_id: str) -> None:
        self.finished.append(self.texts.pop(request_id))

    def advance(self, request_ids, tokens) -> None:
        for r, new in zip(request_ids, tokens):
            assert len(new) > 0
            self.texts[r] += new

    def propose(self, request_ids, limits, floors=None) -> Drafts:
        lengths = [min(int(n), len(self.draft)) for n in limits]
        return Drafts(
            tokens=np.concatenate([self.draft[:n] for n in lengths] or [[]]).astype(np.int32),
            probs=np.concatenate([[0.9] * n for n in lengths] or [[]]),
            starts=np.cumsum([0, *lengths]),
        )


def test_rounds_tokens_and_times_by_hand():
    """7 | 5 5 5 | 5 5 9 | 8: drafts of 5 5 accept 2, 2, 0 tokens; the end leaves room for one draft token less."""
    drafter = Scripted([5, 5])
    report = replay([rollout([7, 5, 5, 5, 5, 5, 9, 8])], drafter, rule("fixed", COST, fixed_tokens=2), 1)
    assert drafter.finished == [[7, 5, 5, 5, 5, 5, 9, 8]]
    assert report.rounds == 3
    assert report.tokens == 7
    assert report.spec.drafted[:2] == [2, 2]
    assert report.spec.accepted[:3] == [2, 2, 0]
    assert report.seconds == pytest.approx(2 * COST(3, 1) + COST(1, 1))
    assert report.seconds_off == pytest.approx(7 * COST(1, 1))
    assert report.ceilings == [pytest.approx(np.exp(-0.5))]


def test_all_is_replayed_at_any_batch_size_and_without_drafts_nothing_is_gained():
    rng = np.random.default_rng(0)
    recorded = [
        rollout(rng.integers(0, 4, rng.integers(0, 30)).tolist(), f"p{i % 3}", i, version=i % 2)
        for i in range(20)
    ]
    for batch in (1, 3, 64):
        for policy in ("off", "fixed", "unlimited", "das", "das_closed", "price"):
            drafter = Scripted([0, 1, 2])
            report = replay(recorded, drafter, rule(policy, COST, max_draft=8), batch)
            assert sorted(drafter.finished) == sorted(r.tokens for r in recorded if r.tokens)
            assert report.tokens == sum(max(len(r.tokens) - 1, 0) for r in recorded)
            if policy == "off":
                assert report.speed_up == pytest.approx(1.0)
                assert report.rounds == report.tokens


def test_acceptance_has_the_law_of_the_verifier():
    """A draft token is accepted with the policy's probability of it. Accepting an equal token only with
    probability exp(logprob) would square that."""
    p = np.array([0.6, 0.3, 0.1])
    rng = np.random.default_rng(0)
    tokens = rng.choice(3, size=6_000, p=p)
    recorded = [rollout(tokens.tolist(), logprobs=np.log(p[tokens]).tolist())]
    for token in range(3):
        report = replay(recorded, Scripted([token]), rule("fixed", COST, fixed_tokens=1), 1)
        rate = report.spec.accepted[0] / report.spec.drafted[0]
        assert rate == pytest.approx(p[token], abs=4 * np.sqrt(p[token] / report.rounds))
    assert report.ceilings[0] == pytest.approx((p**2).sum(), abs=0.01)


def test_the_off_switch_drops_drafts_that_do_not_pay():
    dear = CostTable.linear(1e-6, 1.0)
    recorded = [rollout([5] * 20)]
    off = replay(recorded, Scripted([5]), rule("fixed", dear), 1)
    assert off.spec.steps == 0
    assert off.rounds == 19
    assert off.skipped == 18  # the last step has no room for a draft
    assert off.speed_up == pytest.approx(1.0)
    on = replay(recorded, Scripted([6]), rule("fixed", dear), 1, off_switch=False)
    assert on.speed_up < 0.6


def test_history_makes_the_second_epoch_faster():
    rng = np.random.default_rng(3)
    answers = [rng.integers(0, 50, 60).tolist() for _ in range(4)]
    first = [rollout(a, f"p{i}", 0, 0) for i, a in enumerate(answers)]
    second = [rollout(a, f"p{i}", 0, 1) for i, a in enumerate(answers)]
    cold = replay(first, SuffixDrafter(), rule("price", COST), 4)
    both = replay(first + second, SuffixDrafter(), rule("price", COST), 4)
    assert cold.accepted_per_round < 0.2
    assert sum(both.spec.accepted) - sum(cold.spec.accepted) > 0.8 * 4 * 60 * 0.9
    assert both.speed_up > 1.5


def test_rollouts_are_read_as_they_were_written(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    recorded = [
        rollout([3, 4], spec=SpecStats(steps=1, drafted=[1], accepted=[0]), text="\u00e9", reward=0.5),
        rollout([], sample=1, train=False, finish="length"),
    ]
    write_rollouts(path, recorded)
    assert read_rollouts(path) == (recorded, [])


BAD = {
    "{": "Expecting property name",
    "": "Expecting value",
    "[1]": "not a JSON object",
    '{"problem_id": "p"}': "field 'draft_version' is missing",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, "2"]}, "tokens is not a list of token ids"),
        ({"tokens": [1, -2]}, "tokens is not a list of token ids"),
        ({"prompt_tokens": None}, "prompt_tokens is not a list"),
        ({"logprobs": [0.0]}, "1 logprobs for 2 tokens"),
        ({"logprobs": "x"}, "logprobs is not a list of numbers"),
        ({"problem_id": 3}, "problem_id is not a string"),
        ({"policy_version": "1"}, "policy_version is not an integer"),
        ({"finish": "eos"}, "finish is neither"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"spec": {"x": 1}}, "spec: "),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, change, message):
    path = tmp_path / "r.jsonl"
    write_rollouts(path, [rollout([3, 4])])
    row = json.loads(path.read_text()) | change
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    rollouts, problems = read_rollouts(path)
    assert len(rollouts) == 1
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:2: ")
    assert message in problems[0]


def test_the_command_prints_a_table_and_counts_bad_lines(tmp_path: Path, capsys):
    path = tmp_path / "r.jsonl"
    write_rollouts(path, [rollout(list(range(2, 40)), sample=i, version=i // 2) for i in range(6)])
    path.write_text(path.read_text() + "".join(line + "\n" for line in BAD))
    replay_command([str(path), "--batch", "1,4", "--budget", "off,price"])
    printed = capsys.readouterr()
    assert [line.split()[:2] for line in printed.out.splitlines()[1:5]] == [
        ["off", "1"], ["off", "4"], ["price", "1"], ["price", "4"],
    ]  # fmt: skip
    for number, message in enumerate(BAD.values(), 7):
        assert f"skipped {path}:{number}: {message}" in printed.err
    assert "skipped 4 bad lines of 10" in printed.err


def test_numba_is_imported_only_where_a_suffix_drafter_is_made():
    code = (
        "import sys, torchspec.commands.replay, torchspec.speculation.lengths; print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False"]


def test_what_cannot_be_used_is_refused(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    with pytest.raises(ConfigError, match=r"r\.jsonl: No such file"):
        replay_command([str(path)])
    path.write_text("{\n")
    with pytest.raises(ConfigError, match=r"no rollout in 1 lines; the first: .*:1: Expecting"):
        replay_command([str(path)])
    write_rollouts(path, [rollout([3, 4])])
    for options, message in (
        (["--budget", "off,prize"], "did you mean 'price'"),
        (["--drafter", "sufix"], "did you mean 'suffix'"),
        (["--batch", "1,x"], "--batch 1,x"),
        (["--batch", "0"], "--batch 0"),
        (["--window", "0"], "at least 1"),
        (["--cost", str(path)], "not a cost table"),
    ):
        with pytest.raises(ConfigError, match=message):
            replay_command([str(path), *options])


def test_the_budget_knows_how_many_wait() -> None:
    waiting = []

    class Watching(BudgetRule):
        def allow(self, step):
            waiting.append(step.waiting)
            return super().allow(step)

    rollouts = [rollout([5, 6, 7], sample=i) for i in range(5)]
    replay(
        rollouts, Scripted([]), Watching(BudgetConfig(), BudgetState(COST, Survival(256, 1024)), 2), batch=2
    )
    assert waiting == [3, 3, 1, 1, 0, 0]
