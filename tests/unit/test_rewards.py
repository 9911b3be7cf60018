"""Reward functions, and the worker that shields them from responses."""

import inspect
import os
import re
import signal
import time

import pytest

from torchspec.config.schema import Data, Reward
from torchspec.data.problems import load_problems
from torchspec.data.sources import reasoning_gym_task
from torchspec.errors import ConfigError
from torchspec.records import Problem, Rollout
from torchspec.rewards.judges import EVAL_TASKS, SYMPY_TASKS, harmless
from torchspec.rewards.scorer import build_scorer

FILE = Data(source="jsonl", path="unused")


def rollout(problem_id: str, reward: float | None, **fields) -> Rollout:
    defaults = dict(sample=0, prompt_tokens=[1], tokens=[2], logprobs=[-1.0], finish="stop")
    return Rollout(
        problem_id=problem_id, reward=reward, policy_version=0, draft_version=0, **{**defaults, **fields}
    )


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
