"""Data as people have it: public layouts (docs/data.md), encodings, shards, chats, and errors counted at once."""

import json
import logging
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from torchspec.config.schema import Data
from torchspec.data import encode_prompts, load_problems
from torchspec.data.prompts import prompts_by_id
from torchspec.data.sources import data_files
from torchspec.errors import ConfigError
from torchspec.records import Problem


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path, source="jsonl", **options) -> list[Problem]:
    return load_problems(Data(source=source, path=str(path), **{"size": 0, "eval_size": 0, **options}))[0]


def refusal(path, source="jsonl", **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# The recipes of docs/data.md

SOLUTION = "She sold 48/2 = <<48/2=24>>24 clips in May, for $5 each.\nThat is 72.\n#### "
GSM8K = [
    {"question": f"q{i}", "answer": SOLUTION + answer} for i, answer in enumerate(["72", "1,000", "-5 "])
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": user(f"Solve: {i}"),
        "ability": "MATH",
        "reward_model": {"ground_truth": str(34 + i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{i}"},
    }
    for i in (0, 1, 0, 2, 1, 0)
]
DEEPSCALER = [
    {"problem": f"p{i}", "answer": r"-\frac{2}{3}", "solution": r"1. We ... $-\frac{2}{3}$"} for i in range(3)
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": user(f"q{i}"),
        "ability": "math",
        "reward_model": {"ground_truth": str(i), "style": "rule"},
        "extra_info": {"answer": f"#### {i}", "index": i, "split": "train"},
    }
    for i in range(3)
]
RECIPES = {
    "gsm8k": (
        GSM8K,
        "train-00000-of-00001.parquet",
        dict(source="parquet", prompt_key="question", answer_pattern=r"####\s*(.+)"),
        ["72", "1,000", "-5"],
    ),
    "gsm8k jsonl": (
        GSM8K,
        "train.jsonl",
        dict(prompt_key="question", answer_pattern=r"####\s*(.+)"),
        ["72", "1,000", "-5"],
    ),
    "dapo": (DAPO, "dapo-math-17k.parquet", dict(source="parquet"), ["34", "35", "36"]),
    "deepscaler": (DEEPSCALER, "deepscaler.json", dict(prompt_key="problem"), [r"-\frac{2}{3}"] * 3),
    "verl": (VERL, "train.parquet", dict(source="parquet", id_key="extra_info.index"), ["0", "1", "2"]),
}


@pytest.mark.parametrize(("rows", "name", "options", "answers"), RECIPES.values(), ids=RECIPES)
def test_recipes(tmp_path, rows, name, options, answers):
    if "reward_model" in rows[0]:
        options = options | {"answer_key": "reward_model.ground_truth"}
    problems = load(write(tmp_path / name, rows), **options)
    assert [p.answer for p in problems] == answers
    assert all(p.messages[-1]["role"] == "user" for p in problems)


def test_a_repeated_problem_is_asked_once(tmp_path, caplog):
    path = write(tmp_path / "dapo.parquet", DAPO)
    data = Data(
        source="parquet", path=path, answer_key="reward_model.ground_truth", size=2, eval_size=1, split="x"
    )
    train, held_out = load_problems(data)
    assert [p.answer for p in held_out] == ["34"]
    assert [p.answer for p in train] == ["35", "36"]
    assert "3 of 6 rows repeat a problem" in caplog.text


# Encodings and shapes of one file

LINES = "".join(json.dumps({"prompt": p, "answer": 1}) + "\n" for p in ("é", "b"))
GOOD_FILES = {
    "mark": LINES.encode("utf-8-sig"),
    "two files with marks joined": LINES.splitlines()[0].encode("utf-8-sig")
    + b"\n"
    + LINES.splitlines()[1].encode("utf-8-sig"),
    "windows and a mark": LINES.replace("\n", "\r\n").encode("utf-8-sig"),
    "array with a mark": ("[" + ",\r\n".join(LINES.splitlines()) + "]").encode("utf-8-sig"),
    "array in one line": ("[" + ",".join(LINES.splitlines()) + "]").encode(),
    "no last line end": LINES.rstrip().encode(),
}
BAD_FILES = {
    "utf-16": (LINES.encode("utf-16"), "is UTF-16 or UTF-32; save it as UTF-8"),
    "utf-16 without a mark": (LINES.encode("utf-16-le"), "is UTF-16 without a byte order mark"),
    "utf-16-be": (b"\xfe\xff" + LINES.encode("utf-16-be"), "is UTF-16; save it as UTF-8"),
    "gzip": (b"\x1f\x8b\x08\x00", "is compressed with gzip"),
    "parquet": (b"PAR1....PAR1", 'is a Parquet file; set data.source = "parquet"'),
    "half an array": (b'[\n{"prompt": "a"},\n', "begins as a JSON array, but is none"),
    "item": (b'[{"prompt": "a"}, 3]', "item 2: must be a JSON object, got int"),
    "item without a prompt": (b'[{"prompt": "a"}, {"q": 3}]', 'item 2: no field "prompt"'),
}


@pytest.mark.parametrize("content", GOOD_FILES.values(), ids=GOOD_FILES)
def test_files_that_are_read(tmp_path, content):
    (tmp_path / "d.jsonl").write_bytes(content)
    assert [(p.messages[0]["content"], p.answer) for p in load(tmp_path / "d.jsonl")] == [
        ("é", "1"),
        ("b", "1"),
    ]


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_are_named(tmp_path, content, message):
    (tmp_path / "d.jsonl").write_bytes(content)
    assert message in refusal(tmp_path / "d.jsonl")


# Shards


@pytest.mark.parametrize("end", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize("path", ["", "*", "*-of-3.*", "../*/[a]-*"])
def test_shards_are_read_in_order(tmp_path, end, path):
    for name in "cab":
        write(tmp_path / "data" / f"{name}-of-3.{end}", [{"prompt": f"{name}{i}"} for i in range(2)])
    source = "parquet" if end == "parquet" else "jsonl"
    problems = load(tmp_path / "data" / path, source)
    wanted = [f"{name}{i}" for name in ("a" if "[" in path else "abc") for i in range(2)]
    assert [p.messages[0]["content"] for p in problems] == wanted
    assert problems[1].id == f"a-of-3.{end}:2"
    assert len(data_files(Data(source=source, path=str(tmp_path / "data" / path)))) == len(wanted) // 2


def test_shards_of_one_name_have_different_ids(tmp_path):
    for part in ("easy", "hard"):
        write(tmp_path / part / "0.jsonl", [{"prompt": part}])
    assert [p.id for p in load(tmp_path / "*" / "0.jsonl")] == ["easy/0.jsonl:1", "hard/0.jsonl:1"]
    (tmp_path / "[odd].jsonl").write_text('{"prompt": "x"}')
    assert [p.id for p in load(tmp_path / "[odd].jsonl")] == ["[odd].jsonl:1"]


def test_no_shards(tmp_path):
    assert "no file of *.jsonl or *.json in this folder" in refusal(tmp_path)
    assert "no file matches this (data.path)" in refusal(tmp_path / "*.jsonl")
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    assert "no file of *.parquet in this folder" in refusal(tmp_path, "parquet")
    write(tmp_path / "b.jsonl", [{"q": "a"}])
    assert "b.jsonl:1: no field" in refusal(tmp_path)


# Fields and chats

CHATS = {
    "nulls": [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
    "own system": [{"role": "system", "content": "s"}, *user("a")],
    "turns": [*user("a"), {"role": "assistant", "content": "b"}, *user("c")],
}
BAD_CHATS = {
    "assistant last": ([*user("a"), {"role": "assistant", "content": "b"}], {}, "its last role is assistant"),
    "system only": ([{"role": "system", "content": "s"}], {}, "its last role is system"),
    "null content": ([{"role": "user", "content": None}], {}, '"prompt"[0] must be'),
    "a tool's field": ([{"role": "user", "content": "a", "name": "x"}], {}, '"prompt"[0] must be'),
    "sharegpt": ([{"from": "human", "value": "a"}], {}, '"prompt"[0] must be'),
    "two systems": (CHATS["own system"], {"system_prompt": "t"}, 'set data.system_prompt = ""'),
    "texts": (["a"], {}, '"prompt"[0] must be'),
    "blank": ("  \n", {}, "and not empty"),
    "bool answer": ("a", {"answer_key": "prompt2"}, '"prompt2" must be a string or a number, got True'),
}


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_chats(tmp_path, chat, end):
    path = write(tmp_path / f"d.{end}", [{"prompt": chat}, {"prompt": user("z")}])
    wanted = [{"role": m["role"], "content": m["content"]} for m in chat]
    assert [p.messages for p in load(path, end)] == [wanted, user("z")]


@pytest.mark.parametrize(("chat", "options", "message"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_chats_that_cannot_be_asked(tmp_path, chat, options, message):
    rows = [{"prompt": "a"}, {"prompt": chat, "prompt2": True}]
    said = refusal(write(tmp_path / "d.jsonl", rows), **options)
    assert message in said
    assert "d.jsonl:2: " in said


def test_prompts_as_arrays(tmp_path):
    rows = [{"prompt": np.array(user("a"), dtype=object), "answer": 3}]
    import pandas as pd

    pd.DataFrame(rows).to_parquet(tmp_path / "d.parquet")
    assert load(tmp_path / "d.parquet", "parquet")[0].messages == user("a")
    folder = datasets.Dataset.from_list([{"prompt": user("a"), "answer": 3}]).with_format("numpy")
    folder.save_to_disk(tmp_path / "hf")
    assert load(tmp_path / "hf", "hf")[0].answer == "3"


def test_null_fields(tmp_path):
    rows = [{"prompt": "a", "answer": None}, {"prompt": "b"}, {"prompt": "c", "answer": "1"}]
    assert [p.answer for p in load(write(tmp_path / "d.jsonl", rows))] == [None, None, "1"]
    table = pa.table({"prompt": ["a", "b"], "answer": [float("nan"), 2.5], "m": [{"k": None}, {"k": 1}]})
    parquet.write_table(table, tmp_path / "d.parquet")
    assert [p.answer for p in load(tmp_path / "d.parquet", "parquet")] == [None, "2.5"]
    assert [p.answer for p in load(tmp_path / "d.parquet", "parquet", answer_key="m.k")] == [None, "1"]


MISSING_KEYS = {
    "answer": (dict(answer_key="solution"), '"solution" (data.answer_key) in any of 3 rows'),
    "near": (dict(answer_key="anser"), "did you mean answer?"),
    "nested": (dict(answer_key="ground_truth"), "did you mean meta.ground_truth?"),
    "half": (dict(answer_key="meta.truth"), "did you mean meta.ground_truth?"),
    "too deep": (dict(answer_key="answer.value"), "(data.answer_key)"),
    "prompt": (dict(prompt_key="meta.question"), '"meta.question" (data.prompt_key); fields here: prompt'),
    "id": (dict(id_key="meta.uid"), '"meta.uid" (data.id_key)'),
}


@pytest.mark.parametrize(("options", "message"), MISSING_KEYS.values(), ids=MISSING_KEYS)
def test_a_key_that_exists_nowhere(tmp_path, options, message):
    rows = [{"prompt": f"p{i}", "answer": "1", "meta": {"ground_truth": "2", "id": i}} for i in range(3)]
    said = refusal(write(tmp_path / "d.jsonl", rows), **options)
    assert message in said
    assert "meta.ground_truth" in said


def test_all_errors_of_a_file_are_counted(tmp_path):
    lines = [
        '{"prompt": "a"}',
        "{",
        '{"prompt": ""}',
        '{"q": "a"}',
        "3",
        '{"prompt": "a", "answer": []}',
        "{}",
        "x",
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    path = tmp_path / "d.jsonl"
    places = ", ".join(f"{path}:{n}" for n in (3, 4, 5, 6))
    said = refusal(path)
    assert said.startswith(f"{path}:2: not a JSON line: ")
    assert said.endswith(f"; 7 of 8 rows cannot be used, also {places}, ...")
    table = pa.Table.from_pylist([{"prompt": None}, {"prompt": "a"}, {"prompt": None}])
    parquet.write_table(table, tmp_path / "d.parquet")
    assert refusal(tmp_path / "d.parquet", "parquet").endswith(
        "also {}: row 3".format(tmp_path / "d.parquet")
    )


# Prompts that are too long


class Words:
    """Stands in for a tokenizer: a token is a word."""

    chat_template = "x"

    def apply_chat_template(self, messages, **_):
        return list(range(sum(len(m["content"].split()) for m in messages)))


def long_ones(*lengths: int) -> list[Problem]:
    return [Problem(id=f"p{i}", messages=user("w " * n)) for i, n in enumerate(lengths)]


def test_prompts_that_are_too_long_are_counted_and_can_be_left_out(caplog):
    caplog.set_level(logging.WARNING)
    problems = long_ones(3, 9, 5, 8, 6, 7, 9, 12)
    with pytest.raises(ConfigError) as caught:
        encode_prompts(Words(), problems, 5)  # type: ignore[arg-type]
    said = str(caught.value)
    assert said.startswith("problem p1: its prompt has 9 tokens, at most 5 fit; 6 of 8 problems are too long")
    assert "(the longest 12), also p3, p4, p5, p6, ...; raise model.max_len" in said
    assert 'data.overlong = "skip"' in said
    assert not caplog.records
    kept = prompts_by_id(Words(), problems, 5, "skip")  # type: ignore[arg-type]
    assert {key: len(tokens) for key, tokens in kept.items()} == {"p0": 3, "p2": 5}
    assert len(caplog.records) == 1
    assert "6 of 8 problems" in caplog.text
    with pytest.raises(ConfigError, match="that leaves none"):
        prompts_by_id(Words(), long_ones(7, 8), 5, "skip")  # type: ignore[arg-type]
