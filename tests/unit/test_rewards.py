"""Reward functions, the worker that shields them from responses, and advantages."""

import inspect
import math
import os
import random
import re
import signal
import statistics
import time

import pytest

from torchspec.config.schema import RL, Data, Reward
from torchspec.data.problems import load_problems
from torchspec.data.sources import reasoning_gym_task
from torchspec.errors import ConfigError
from torchspec.records import Problem, Rollout
from torchspec.rewards.advantages import group_advantages
from torchspec.rewards.judges import EVAL_TASKS, SYMPY_TASKS, harmless
from torchspec.rewards.scorer import build_scorer

FILE = Data(source="jsonl", path="unused")


def problem(answer: str | None = "12", **fields) -> Problem:
    return Problem(id="p", messages=[{"role": "user", "content": "q"}], answer=answer, **fields)


def score(functions: list[str], answer: str, response: str, truncated=False, **reward) -> float:
    scorer = build_scorer(Reward(functions=functions, **reward), FILE)
    return scorer.score(problem(answer), response, truncated)[0]


# Functions without a worker


@pytest.mark.parametrize(
    ("response", "exact", "form"),
    [
        ("<answer>12</answer>", 1, 1),
        ("so <answer> 12\n</answer> \n", 1, 1),
        ("<answer>13</answer>", 0, 1),
        ("12", 0, 0),
        ("<answer>12", 0, 0),
        ("<answer></answer>", 0, 1),
        ("<answer>12</answer> I think", 1, 0),
        ("<answer>11</answer><answer>12</answer>", 1, 0),
        ("<answer>12</answer><answer>11</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_exact_and_format(response, exact, form):
    assert score(["exact"], " 12 ", response) == exact
    assert score(["format"], "12", response) == form


def test_answers_may_have_several_lines():
    assert score(["exact"], "1 2\n3 4", "<answer>\n1 2\n3 4\n</answer>") == 1


def test_without_a_pattern_the_whole_response_is_the_answer():
    assert score(["exact"], "12", " 12\n", answer_pattern="") == 1
    assert score(["exact"], "12", "is 12", answer_pattern="") == 0


def test_cut_responses_score_0_even_with_an_answer():
    assert score(["exact", "format"], "12", "<answer>12</answer>", truncated=True) == 0


def test_weights_and_parts():
    scorer = build_scorer(Reward(functions=["exact", "format"], weights=[2.0, 0.5]), FILE)
    assert scorer.score(problem(), "<answer>12</answer>") == (2.5, {"exact": 1.0, "format": 1.0})
    assert scorer.score(problem(), "<answer>1</answer>") == (0.5, {"exact": 0.0, "format": 1.0})


def test_score_all_fills_rollouts():
    scorer = build_scorer(Reward(functions=["exact"]), FILE)
    rollouts = [rollout("p", None, text="<answer>12</answer>", finish=f) for f in ("stop", "length")]
    scorer.score_all({"p": problem()}, rollouts)
    assert [(r.reward, r.reward_parts) for r in rollouts] == [(1.0, {"exact": 1.0}), (0.0, {"exact": 0.0})]


# A user's function


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "NUMBER = 3\n"
        "def length(problem, response): return len(response) / 10\n"
        "def positive(problem, response): return bool(response)\n"
        "def nan(problem, response): return float('nan')\n"
        "def none(problem, response): pass\n"
        "def by_level(problem, response): return problem.meta['level']\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("path", ["my_rewards:length", "my_rewards.length"])
def test_a_users_function_sees_every_response(user_module, path):
    assert score([path], "", "abcde") == 0.5
    assert score([path], "", "abcde", truncated=True) == 0.5
    assert score(["my_rewards:positive"], "", "abcde") == 1.0


def test_a_users_function_gets_the_other_fields(user_module):
    scorer = build_scorer(Reward(functions=["my_rewards:by_level"]), FILE)
    assert scorer.score(problem(meta={"level": 4}), "x")[0] == 4.0


@pytest.mark.parametrize("name", ["nan", "none"])
def test_a_users_function_must_return_finite_numbers(user_module, name):
    with pytest.raises(
        ValueError, match=rf"reward\.functions: my_rewards:{name} returned .* for problem p; it must"
    ):
        score([f"my_rewards:{name}"], "", "x")


# Bad configuration

BAD_REWARDS = {
    "none": ({"functions": []}, ["reward.functions = []", "at least one"]),
    "twice": ({"functions": ["exact", "exact"]}, ["reward.functions", "each once"]),
    "weights": (
        {"functions": ["exact", "format"], "weights": [1.0]},
        ["reward.weights has 1 numbers for 2 reward.functions", "[] for all 1"],
    ),
    "unknown": (
        {"functions": ["exakt"]},
        ["reward.functions", '"exakt"', "exact, format, math_verify, reasoning_gym", "pkg.mod:fn"],
    ),
    "no module": ({"functions": ["no_such_module:f"]}, ['cannot import "no_such_module:f"', "PYTHONPATH"]),
    "broken module": (
        {"functions": ["broken_rewards:f"]},
        ['cannot import "broken_rewards:f"', "a_module_that_is_not_there"],
    ),
    "no function": ({"functions": ["my_rewards:f"]}, ['"my_rewards:f": my_rewards has no function f']),
    "not callable": ({"functions": ["my_rewards:NUMBER"]}, ["my_rewards has no function NUMBER"]),
    "reasoning_gym on a file": (
        {"functions": ["reasoning_gym"]},
        ['data.source = "jsonl"', "use exact, math_verify or your own"],
    ),
    "bad pattern": (
        {"functions": ["exact"], "answer_pattern": "<a>(.*"},
        ["reward.answer_pattern is not a regular expression", "<a>(.*"],
    ),
    "no group": (
        {"functions": ["exact"], "answer_pattern": "<a>.*"},
        ["reward.answer_pattern needs a group"],
    ),
    "format of nothing": ({"functions": ["format"], "answer_pattern": ""}, ["format", "set it"]),
}


@pytest.mark.parametrize(("fields", "fragments"), BAD_REWARDS.values(), ids=BAD_REWARDS)
def test_bad_rewards(user_module, fields, fragments):
    with pytest.raises(ConfigError) as caught:
        build_scorer(Reward(**fields), FILE)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("function", ["exact", "math_verify"])
@pytest.mark.parametrize("answer", [None, " "])
def test_missing_answers_are_found_before_the_run(function, answer):
    scorer = build_scorer(Reward(functions=["format", function]), FILE)
    scorer.check_answers([problem()])
    with pytest.raises(
        ConfigError, match=f"problem p: no answer, .* {function} needs; set data.answer_key .*sol"
    ):
        scorer.check_answers([problem(), problem(answer, meta={"solution": "12"})])
    build_scorer(Reward(functions=["format"]), FILE).check_answers([problem(answer)])


# math-verify in its worker


@pytest.fixture(scope="module")
def math_scorer():
    scorer = build_scorer(Reward(functions=["math_verify"], timeout_s=2.0), FILE)
    yield scorer
    scorer.close()


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("1/2", "0.5", 1),
        ("\\frac{1}{2}", "$\\frac{2}{4}$", 1),
        ("(x+1)^2", "x^2 + 2x + 1", 1),
        ("72", "\\boxed{72}", 1),
        ("1000", "1,000", 1),
        ("72", "73", 0),
        ("2", "2*x", 0),
        ("72", "", 0),
        ("72", "}{\\frac{$$", 0),
    ],
)
def test_math_verify(math_scorer, reference, answer, expected):
    assert math_scorer.score(problem(reference), f"<answer>{answer}</answer>")[0] == expected


def test_a_hung_worker_is_replaced(math_scorer):
    math_scorer.failures.clear()
    start = time.monotonic()
    assert math_scorer.score(problem("1"), "<answer>$9^{9^{9^{9}}}$</answer>")[0] == 0
    assert 2.0 <= time.monotonic() - start < 4.0
    assert math_scorer.failures == {"timeout": 1}
    assert math_scorer.score(problem("1"), "<answer>1</answer>")[0] == 1


def test_a_worker_that_dies_at_work_costs_one_response(math_scorer, monkeypatch):
    math_scorer.failures.clear()
    worker = math_scorer._worker
    assert worker.ask("math_verify", "1", "1") == (1.0, None)
    os.kill(worker._process.pid, signal.SIGKILL)
    with monkeypatch.context() as m:  # it died after we looked
        m.setattr(worker._process, "poll", lambda: None)
        assert math_scorer.score(problem("1"), "<answer>1</answer>")[0] == 0
    assert math_scorer.failures == {"crash": 1}
    assert math_scorer.score(problem("1"), "<answer>1</answer>")[0] == 1


def test_a_worker_that_died_idle_costs_nothing(math_scorer):
    math_scorer.failures.clear()
    assert math_scorer.score(problem("1"), "<answer>1</answer>")[0] == 1
    worker = math_scorer._worker
    worker._process.kill()
    worker._process.wait()
    assert math_scorer.score(problem("1"), "<answer>1</answer>")[0] == 1
    assert not math_scorer.failures


def test_the_worker_is_lazy_and_close_ends_it():
    alarm = signal.getsignal(signal.SIGALRM)
    scorer = build_scorer(Reward(functions=["math_verify"]), FILE)
    assert scorer._worker._process is None
    scorer.close()
    scorer.score(problem("1"), "<answer>1</answer>")
    process = scorer._worker._process
    scorer.close()
    assert process.returncode is not None
    assert signal.getsignal(signal.SIGALRM) == alarm  # no alarm of ours in this process


# reasoning-gym


@pytest.fixture(scope="module")
def countdown():
    data = Data(task="countdown", size=1, eval_size=0)
    scorer = build_scorer(Reward(functions=["reasoning_gym"], timeout_s=2.0), data)
    yield load_problems(data)[0][0], scorer
    scorer.close()


def test_reasoning_gym_keeps_the_tasks_own_scores(countdown):
    task, scorer = countdown
    scorer.check_answers([task])
    assert scorer.score(task, f"<answer>{task.answer}</answer>")[0] == 1.0
    assert scorer.score(task, "<answer>1 + 1</answer>")[0] == 0.05
    assert scorer.score(task, "<answer>((</answer>")[0] == 0.01
    assert scorer.score(task, task.answer)[0] == 0.0
    assert scorer.score(task, f"<answer>{task.answer}</answer>", truncated=True)[0] == 0.0


def test_responses_are_not_executed(countdown, tmp_path):
    task, scorer = countdown
    trace = tmp_path / "trace"
    assert scorer.score(task, f"<answer>open('{trace}', 'w')</answer>")[0] == 0.0
    assert not trace.exists()


def test_an_endless_formula_is_cut(countdown):
    task, scorer = countdown
    scorer.failures.clear()
    assert scorer.score(task, "<answer>9**9**9**9</answer>")[0] == 0.0
    assert scorer.failures == {"timeout": 1}


@pytest.mark.parametrize(
    ("task", "answer", "expected"),
    [
        ("countdown", "(12 + 3.5) * 4 / 2 - 1", True),
        ("simple_integration", "x**3/3 + 2*sin(x) + C", True),
        ("countdown", "exec('1')", False),
        ("countdown", "__import__", False),
        ("countdown", "'1'.zfill(9)", False),
        ("countdown", "eval(chr(49))", False),
        ("countdown", "5! + exit()", False),
        ("countdown", "x.doit()", False),
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "A B C", True),
        ("string_insertion", "oracle_answer", False),
        ("string_insertion", "exit()", False),
        ("string_insertion", "\n (exit())", False),
        ("string_insertion", "[x for x in 'AB']", False),
        ("spell_backward", "exit()", True),
    ],
)
def test_what_reaches_an_evaluating_scorer(task, answer, expected):
    assert harmless(task, answer) is expected


def test_every_evaluating_scorer_is_known():
    """A new release of reasoning-gym may evaluate responses in more tasks."""
    reasoning_gym_task("spell_backward", {}, size=1)  # imports it without its warnings
    from reasoning_gym.factory import DATASETS

    evaluating = set()
    for name, (task, _) in DATASETS.items():
        scorer = inspect.getsource(task.score_answer)
        if re.search(r"\beval\((?!entry)|\bexec\(|sympify\(|parse_expr\(", scorer):
            evaluating.add(name)
    assert evaluating == EVAL_TASKS | SYMPY_TASKS


@pytest.mark.parametrize("task", sorted(EVAL_TASKS | SYMPY_TASKS))
def test_true_answers_of_evaluating_tasks_are_let_through(task):
    generator = reasoning_gym_task(task, {}, size=20)
    entries = [generator[i] for i in range(5)]
    assert all(generator.score_answer(e["answer"], e) == 1.0 for e in entries)
    if task in SYMPY_TASKS - {"intermediate_integration"}:  # it has `Integral(...)`, let through if equal
        assert all(harmless(task, e["answer"]) for e in entries)


# Advantages


def rollout(problem_id: str, reward: float | None, **fields) -> Rollout:
    defaults = dict(sample=0, prompt_tokens=[1], tokens=[2], logprobs=[-1.0], finish="stop")
    return Rollout(
        problem_id=problem_id, reward=reward, policy_version=0, draft_version=0, **{**defaults, **fields}
    )


def advantages(rollouts: list[Rollout], **rl) -> list[float]:
    group_advantages(rollouts, RL(**rl))
    return [r.advantage for r in rollouts]


def test_advantages_against_the_formula():
    rng = random.Random(0)
    rewards = {f"p{i}": [rng.random() for _ in range(8)] for i in range(4)}
    rollouts = [rollout(f"p{i % 4}", rewards[f"p{i % 4}"][i // 4]) for i in range(32)]  # interleaved groups
    for normalise in (True, False):
        for r, got in zip(rollouts, advantages(rollouts, normalise_std=normalise), strict=True):
            group = rewards[r.problem_id]
            scale = statistics.pstdev(group) + 1e-6 if normalise else 1.0
            assert got == pytest.approx((r.reward - statistics.fmean(group)) / scale, rel=1e-12)


def test_advantages_by_hand():
    rollouts = [rollout("p", x) for x in (0.0, 1.0)]
    assert advantages(rollouts) == pytest.approx([-0.5 / 0.500001, 0.5 / 0.500001], rel=1e-15)
    assert advantages(rollouts, normalise_std=False) == [-0.5, 0.5]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("normalise", [True, False])
def test_equal_rewards_give_exactly_0(size, normalise):
    for reward in (0.1, 0.7, 1.1, 1e9 + 0.1, -0.3):
        assert (
            advantages([rollout("p", reward) for _ in range(size)], normalise_std=normalise) == [0.0] * size
        )


def cut_group() -> list[Rollout]:
    return [rollout("p", 1.0), rollout("p", 0.0), rollout("p", 1.0, finish="length", advantage=9.0)]


def test_overlong_mask_leaves_the_statistics_and_the_loss():
    group = cut_group()
    assert advantages(group, overlong="mask", normalise_std=False) == [0.5, -0.5, 0.0]
    assert [r.train for r in group] == [True, True, False]
    assert [r.reward for r in group] == [1.0, 0.0, 1.0]


def test_overlong_penalise_counts_less():
    group = cut_group()
    got = advantages(group, overlong="penalise", overlong_penalty=1.5, normalise_std=False)
    assert got == pytest.approx([1 - 1 / 6, -1 / 6, -0.5 - 1 / 6])
    assert [r.train for r in group] == [True] * 3
    assert group[2].reward == -0.5
    assert [r.reward_parts for r in group] == [{"overlong": 0.0}, {"overlong": 0.0}, {"overlong": -1.5}]


def test_overlong_keep_is_as_any_other():
    group = cut_group()
    got = advantages(group, overlong="keep", normalise_std=False)
    assert got == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert all(r.train for r in group)
    assert math.isclose(math.fsum(got), 0.0, abs_tol=1e-15)


def test_a_group_of_cut_responses_only():
    group = [rollout("p", x, finish="length") for x in (0.0, 1.0)]
    assert advantages(group, overlong="mask") == [0.0, 0.0]
    assert not any(r.train for r in group)
