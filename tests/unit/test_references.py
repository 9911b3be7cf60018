"""References: what the judge reads, what it cannot, and the pattern that picks them out of a field."""

import json
import logging

import pytest

from torchspec.config.schema import Data, Reward
from torchspec.data import load_problems
from torchspec.errors import ConfigError
from torchspec.records import Problem
from torchspec.rewards import build_scorer
from torchspec.rewards.judges import as_latex

BOXED = r"\\boxed\{(.*)\}"


@pytest.fixture(scope="module")
def scorers():
    data = Data(source="jsonl", path="unused")
    made = {
        "<answer>{}</answer>": build_scorer(Reward(functions=["math_verify"]), data),
        r"So \boxed{{{}}}": build_scorer(Reward(functions=["math_verify"], answer_pattern=BOXED), data),
    }
    yield made
    for scorer in made.values():
        scorer.close()


def problem(answer: str | None, key: str = "p") -> Problem:
    return Problem(id=key, messages=[{"role": "user", "content": "q"}], answer=answer)


PAIRS = [  # reference, answer, score
    (r"\$1,234.50", "1234.5", 1),
    (r"\$1,234.50", r"$$\$1{,}234.50$$", 1),
    (r"\$1,234.50", "1235.50", 0),
    (r"{\$}5", "5", 1),
    (r"\(\frac{1}{2}\)", "0.5", 1),
    (r"\[ \frac{1}{2} \]", r"$$\frac{2}{4}$$", 1),
    ("$$x + 1$$", "1 + x", 1),
    ("$$x + 1$$", r"\(x - 1\)", 0),
    (r"32\,348", "32348", 1),
    (r"1{,}000{,}000", "1,000,000", 1),
    (r"1\!,000", r"1\ 000", 1),
    (r"32,\!348", "32,348", 1),
    (r"1{,}000", "100", 0),
    (r"50\%", "50%", 1),
    (r"50\%", r"\(50\%\)", 1),
    (r"50\%", "49", 0),
    (r"\text{Monday}", "Monday", 1),
    (r"\text{(A)}", "A", 1),
    (r"12\text{ cm}^2", "12", 1),
    ("(1,2)", r"\left(1, 2\right)", 1),
    ("(1,2)", "(1,3)", 0),
    (r"\{1,2\}", "$\\{2, 1\\}$", 1),
    ("it is $5$ or so", "5", 1),
    ("$5", r"\$5", 1),
    ("5$", "5", 1),
    ("$5", "6", 0),
]


@pytest.mark.parametrize(("reference", "answer", "expected"), PAIRS)
def test_dollars_delimiters_and_thousands(scorers, reference, answer, expected):
    for form, scorer in scorers.items():
        assert scorer.score(problem(reference), form.format(answer))[0] == expected, form


def test_what_math_verify_is_given():
    for text in ("5", "$5$", "$$5$$", r"\[5\]", r"\(5\)", r" \[\$5\] ", r"\($5$\)"):
        assert as_latex(text) == "$5$", text
    for text in ("$1$ and $2$", "$1$, $2$"):
        assert as_latex(text) == text


# Every reference against itself

READ = [
    "72",
    "-3",
    "0.5",
    r"\frac{1}{2}",
    r"\$18.90",
    "no solution",
    r"\text{Monday}",
    r"x \ge 3",
    "(1,2]",
    "A",
    "12:30",
]
UNREAD = [r"\text{}", "???", r"\frac{1", "\\", "---", "x+", r"\begin{cases} x \\ y"]


@pytest.mark.parametrize("answer", READ)
def test_references_that_are_read(scorers, answer):
    for scorer in scorers.values():
        assert scorer.check_answers([problem(answer)]) == [problem(answer)]


@pytest.mark.parametrize("answer", UNREAD)
def test_references_that_are_not_read(scorers, answer):
    with pytest.raises(
        ConfigError, match=r"problem p: math_verify cannot read its answer .*; .*\"skip\""
    ) as caught:
        scorers["<answer>{}</answer>"].check_answers([problem("1", "a"), problem(answer)])
    assert "\n" not in str(caught.value)


def test_unread_references_are_counted_and_can_be_left_out(caplog):
    caplog.set_level(logging.WARNING)
    answers = ["1", "???", "2", "", None, "???", "---", r"\text{}", r"\frac{1", "3"]
    problems = [problem(answer, f"p{i}") for i, answer in enumerate(answers)]
    for unreadable in ("error", "skip"):
        data = Data(source="jsonl", path="x", unreadable=unreadable)
        scorer = build_scorer(Reward(functions=["format", "math_verify"]), data)
        if unreadable == "error":
            with pytest.raises(ConfigError) as caught:
                scorer.check_answers(problems)
            said = str(caught.value)
            assert "problem p1: math_verify cannot read its answer '???'; 7 of 10 problems" in said
            assert "also p3, p4, p5, p6, ...; data.unreadable" in said
            assert not caplog.records
        else:
            assert [p.id for p in scorer.check_answers(problems)] == ["p0", "p2", "p9"]
            assert len(caplog.records) == 1
            assert "7 of 10" in caplog.text
            with pytest.raises(ConfigError, match="that leaves none"):
                scorer.check_answers(problems[3:5])
        scorer.close()


def test_a_worked_solution_is_no_reference_for_exact():
    scorer = build_scorer(Reward(functions=["exact"]), Data(source="jsonl", path="x"))
    with pytest.raises(
        ConfigError, match=r"worked solution, .* set data\.answer_pattern = '####\\s\*\(\.\+\)'"
    ):
        scorer.check_answers([problem("72 clips.\n#### 72")])
    assert scorer.check_answers([problem("1 2\n3 4")])


# data.answer_pattern

PICKED = {
    "gsm8k": (r"####\s*(.+)", "48/2 = 24\n#### 72", "72"),
    "last": (r"####\s*(\S+)", "#### 1\n#### 2", "2"),
    "boxed": (BOXED, r"so $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
    "lines": (r"<a>(.*?)</a>", "<a>1\n2</a>", "1\n2"),
    "number": (r"(\d+)", 72, "72"),
    "second group": (r"(?:A|B): (\d)(\d)", "A: 12", "1"),
    "whole": ("", " #### 72 ", " #### 72 "),
    "null": (r"(\d+)", None, None),
}


@pytest.mark.parametrize(("pattern", "field", "answer"), PICKED.values(), ids=PICKED)
def test_the_pattern_picks_the_answer(tmp_path, pattern, field, answer):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "a", "answer": field}))
    data = Data(source="jsonl", path=str(tmp_path / "d.jsonl"), size=0, eval_size=0, answer_pattern=pattern)
    assert load_problems(data)[0][0].answer == answer


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("#### (.+", "data.answer_pattern is not a regular expression: "),
        ("#### .+", "data.answer_pattern needs a group (...) around the answer: #### .+"),
        ("*", "data.answer_pattern is not"),
        (
            r"#### (\d+)",
            "d.jsonl:2: no match for data.answer_pattern in 'none'; 3 of 4 references have no match",
        ),
        (r"####(\d*)", "d.jsonl:1: no match for data.answer_pattern in '#### 7'; 4 of 4"),
    ],
)
def test_patterns_that_find_nothing(tmp_path, caplog, pattern, message):
    path = tmp_path / "d.jsonl"
    rows = [{"prompt": f"{i}", "answer": answer} for i, answer in enumerate(["#### 7", "none", "", "####"])]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = Data(source="jsonl", path=str(path), size=0, eval_size=0, answer_pattern=pattern)
    with pytest.raises(ConfigError) as caught:
        load_problems(data)
    assert message in str(caught.value)
    if "3 of 4" in message:
        data.unreadable = "skip"
        assert [p.answer for p in load_problems(data)[0]] == ["7"]
        assert "3 of 4 rows left out" in caplog.text
