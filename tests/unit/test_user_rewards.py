"""Reward functions of users: what they may return, how they fail, and what [reward] may not say."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchspec.config.schema import Data, Reward
from torchspec.errors import ConfigError, RewardFailed
from torchspec.records import Problem, Rollout
from torchspec.rewards.scorer import build_scorer

FILE = Data(source="jsonl", path="unused")


def problem(answer: str | None = "12", **fields) -> Problem:
    return Problem(id="p", messages=[{"role": "user", "content": "q"}], answer=answer, **fields)


def rollout(problem_id: str, reward: float | None, **fields) -> Rollout:
    defaults = dict(sample=0, prompt_tokens=[1], tokens=[2], logprobs=[-1.0], finish="stop")
    return Rollout(
        problem_id=problem_id, reward=reward, policy_version=0, draft_version=0, **{**defaults, **fields}
    )


MY_REWARDS = """
import functools, os, signal, subprocess, sys, time
from decimal import Decimal
from fractions import Fraction
NUMBER = 3
calls = 0
@functools.cache
def values():  # importing torch takes seconds
    import numpy as np, torch
    return {
    "bool": True, "int": 1, "float": 1.0, "fraction": Fraction(2, 2), "decimal": Decimal("1.0"),
    "numpy scalar": np.float32(1), "numpy int": np.int64(1), "numpy bool": np.bool_(True), "array": np.array([1.0]),
    "tensor": torch.tensor(1.0), "tensor of one": torch.ones(1, 1), "bfloat16": torch.tensor(1, dtype=torch.bfloat16),
    "nan": float("nan"), "inf": float("inf"), "-inf": -np.inf, "none": None, "text": "1.0", "list": [1.0],
    "dict": {"score": 1.0}, "tuple": (1.0, {}), "complex": 1j, "huge": 10**400, "decimal nan": Decimal("sNaN"),
    "tensor of two": torch.ones(2), "nan tensor": torch.tensor(float("nan")), "function": len,
    "array of two": np.ones(2),
}
def length(problem, response): return len(response) / 10
def by_level(problem, response): return problem.meta["level"]
def value(problem, response): return values()[response]
def counting(problem, response):
    global calls
    calls += 1
    return calls
class Grader:
    def __call__(self, problem, response): return 1.0
grader = Grader()
def fail(problem, response):
    match response:
        case "raises": raise KeyError("solution")
        case "asserts": assert response == "x"
        case "exits": sys.exit(0)
        case "interrupted": raise KeyboardInterrupt
        case "lines": raise ValueError("two\\nlines " + "x" * 9999)
        case "recursion": return fail(problem, response)
        case "hangs": time.sleep(99)
        case "loops":
            while True: pass
        case "deaf":
            for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
            signal.alarm(0)
            while True: time.sleep(9)
        case "regex": __import__("re").match(r"(a+)+$", "a" * 40 + "b")
        case "child": subprocess.run(["sleep", "98.76"])
        case "dies": os._exit(1)
        case "crashes": os.kill(os.getpid(), signal.SIGSEGV)
        case _: return 1.0
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "raising_rewards.py").write_text(
        "x = 1\nTABLE = {}['x']\ndef f(problem, response): return 1.0\n"
    )
    (tmp_path / "exiting_rewards.py").write_text("raise SystemExit('set API_KEY')\n")
    (tmp_path / "dying_rewards.py").write_text("import os; os._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def users_scorer(user_module):
    made = []

    def build(function: str, **reward):
        made.append(build_scorer(Reward(functions=[f"my_rewards:{function}"], **reward), FILE))
        return made[-1]

    yield build
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize("path", ["my_rewards:length", "my_rewards.length"])
def test_a_users_function_sees_every_response(user_module, path):
    scorer = build_scorer(Reward(functions=[path]), FILE)
    assert scorer.score(problem(""), "abcde")[0] == 0.5
    assert scorer.score(problem(""), "abcde", truncated=True)[0] == 0.5
    scorer.close()


def test_a_users_function_gets_the_other_fields_and_keeps_its_state(users_scorer):
    assert users_scorer("by_level").score(problem(meta={"level": 4}), "x")[0] == 4.0
    counting = users_scorer("counting")
    assert [counting.score(problem(), "x")[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    assert users_scorer("grader").score(problem(), "x")[0] == 1.0


def test_what_a_users_function_may_return(users_scorer):
    scorer = users_scorer("value", timeout_s=60.0)  # its first call imports torch
    for name in (
        "bool",
        "int",
        "float",
        "fraction",
        "decimal",
        "numpy scalar",
        "numpy int",
        "numpy bool",
        "array",
    ):
        assert scorer.score(problem(), name) == (1.0, {"my_rewards:value": 1.0}), name
    for name in ("tensor", "tensor of one", "bfloat16"):
        assert scorer.score(problem(), name)[0] == 1.0, name
    refused = (
        "nan",
        "inf",
        "-inf",
        "none",
        "text",
        "list",
        "dict",
        "tuple",
        "complex",
        "huge",
        "decimal nan",
    )
    for name in (*refused, "tensor of two", "nan tensor", "function", "array of two"):
        with pytest.raises(
            RewardFailed, match=r"my_rewards:value returned .* for problem p; it must"
        ) as caught:
            scorer.score(problem(), name)
        assert "\n" not in str(caught.value)
    assert scorer.failures == {"value": 15}


FAILURES = {
    "raises": r"error: KeyError: 'solution' \(.*my_rewards\.py:\d+\)",
    "asserts": r"error: AssertionError: AssertionError \(",
    "exits": r"error: SystemExit: 0 \(",
    "interrupted": r"error: KeyboardInterrupt: ",
    "lines": r"error: ValueError: two lines x+ \(",
    "recursion": r"error: RecursionError: ",
    "hangs": r"timeout: more than reward\.timeout_s = 0\.5 s",
    "loops": r"timeout: ",
    "deaf": r"timeout: ",
    "regex": r"timeout: ",
    "child": r"timeout: ",
    "dies": r"crash: the worker died",
    "crashes": r"crash: ",
}


def test_a_users_function_that_fails_is_named_with_problem_and_sample(users_scorer):
    scorer = users_scorer("fail", timeout_s=0.5)
    for response, message in FAILURES.items():
        expected = rf"^reward\.functions: my_rewards:fail failed for problem p, sample 3: {message}.*max_failures = 0$"
        with pytest.raises(RewardFailed, match=expected) as caught:
            scorer.score(problem(), response, sample=3)
        assert len(str(caught.value)) < 800
        assert scorer.score(problem(), "fine")[0] == 1.0  # the next response is scored
    assert not [line for line in os.popen("ps -eo args").read().splitlines() if "sleep 98.76" in line]


def test_failures_up_to_a_limit_count_as_a_score(users_scorer, caplog):
    scorer = users_scorer("fail", max_failures=2, failure_score=-0.5)
    made = [rollout("p", None, text=text, sample=i) for i, text in enumerate(["raises", "", "dies"])]
    for _ in range(2):  # the limit is a step's
        scorer.score_all({"p": problem()}, made)
        assert [r.reward for r in made] == [-0.5, 1.0, -0.5]
    assert scorer.failures == {"error": 2, "crash": 2}
    assert "sample 2: crash: the worker died; it scores reward.failure_score = -0.5" in caplog.text
    third = rollout("p", None, text="exits", sample=7)
    with pytest.raises(RewardFailed, match=r"sample 7: .*failure 3 of this step.*reward\.max_failures = 2"):
        scorer.score_all({"p": problem()}, [*made, third])
    assert third.reward is None


def test_a_signal_ends_a_hanging_function_at_once(users_scorer):
    """As `Interrupt.abandonable` and a plain Ctrl-C do: an exception out of a signal handler."""
    scorer = users_scorer("fail", timeout_s=60.0)
    scorer.score(problem(), "")
    process = scorer._users_worker._process
    start = time.monotonic()
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            scorer.score(problem(), "deaf")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - start < 3.0
    assert process.returncode == -signal.SIGKILL
    assert scorer.score(problem(), "")[0] == 1.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_worker_does_not_outlive_a_program_that_is_ended(user_module, tmp_path, number):
    program = (
        "import os, sys; from torchspec.config.schema import Data, Reward; from torchspec.records import Problem\n"
        "from torchspec.rewards import build_scorer\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "s = build_scorer(Reward(functions=['my_rewards:fail'], timeout_s=60.0), Data(source='jsonl', path='x'))\n"
        "print(s._users_worker._process.pid, flush=True)\n"
        "s.score(Problem(id='p', messages=[]), 'deaf')\n"
    )
    main = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    worker = int(main.stdout.readline())
    time.sleep(0.5)
    os.killpg(main.pid, number)  # as a terminal does for Ctrl-C
    assert main.wait(5) != 0
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    assert main.stderr.read().count("Traceback") == (
        number == signal.SIGINT
    )  # of the program, not of the worker


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
    "a module that raises": (
        {"functions": ["raising_rewards:f"]},
        ['importing "raising_rewards:f" fails: KeyError', "raising_rewards.py:2"],
    ),
    "a module that exits": ({"functions": ["exiting_rewards:f"]}, ["SystemExit: set API_KEY"]),
    "a module that ends its process": (
        {"functions": ["dying_rewards:f"]},
        ["worker of dying_rewards:f died"],
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
