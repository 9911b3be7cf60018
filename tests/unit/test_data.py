"""Problems from every source, bad input with the words of its message, tokens, and the endless order."""

import json
from collections import Counter

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from torchspec.config.schema import Data
from torchspec.data.problems import load_problems
from torchspec.data.prompts import check_tokenizer, encode_prompt, encode_prompts
from torchspec.data.sampler import ProblemOrder
from torchspec.errors import ConfigError
from torchspec.records import Problem

ROWS = [{"prompt": f"{i} + {i}?", "answer": i + i, "level": i % 3, "name": f"n{i}"} for i in range(10)]


def jsonl(tmp_path, *lines: str | bytes | dict) -> str:
    """Write lines (dicts as JSON) and return the path."""
    path = tmp_path / "data.jsonl"
    encoded = [json.dumps(x) if isinstance(x, dict) else x for x in lines]
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in encoded))
    return str(path)


def from_file(path: str, source="jsonl", **fields) -> Data:
    return Data(source=source, path=path, **{"size": 0, "eval_size": 0, **fields})


def questions(problems: list[Problem]) -> list[str]:
    return [p.messages[-1]["content"] for p in problems]


# Files


def write_jsonl(tmp_path):
    return jsonl(tmp_path, *ROWS)


def write_parquet(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    return str(tmp_path / "data.parquet")


def write_hf(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "data.hf")
    return str(tmp_path / "data.hf")


@pytest.mark.parametrize(
    ("source", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet), ("hf", write_hf)]
)
def test_the_file_sources_give_the_same_problems(tmp_path, source, write):
    train, held_out = load_problems(from_file(write(tmp_path), source, size=5, eval_size=3))
    assert train[1] == Problem(
        id=f"data.{source}:2",
        messages=[{"role": "user", "content": "1 + 1?"}],
        answer="2",
        meta={"level": 1, "name": "n1"},
    )
    assert questions(train) == [r["prompt"] for r in ROWS[:5]]
    assert questions(held_out) == [r["prompt"] for r in ROWS[7:]]


def test_size_0_takes_all(tmp_path):
    train, held_out = load_problems(from_file(write_jsonl(tmp_path), eval_size=4))
    assert (len(train), len(held_out)) == (6, 4)


def test_a_split_of_a_data_set_folder(tmp_path):
    folder = str(tmp_path / "splits")
    splits = {"train": ROWS[:4], "test": ROWS[4:]}
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()}).save_to_disk(folder)
    train, _ = load_problems(from_file(folder, "hf", split="test"))
    assert questions(train) == [r["prompt"] for r in ROWS[4:]]
    with pytest.raises(ConfigError, match=r'splits: no split "dev" \(data.split\); it has: train, test$'):
        load_problems(from_file(folder, "hf", split="dev"))


def test_chat_messages_system_prompt_and_own_ids(tmp_path):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = jsonl(tmp_path, {"q": chat, "key": 7}, "", {"q": "d", "key": "x"})
    data = from_file(path, prompt_key="q", id_key="key", system_prompt="Be brief.")
    train, held_out = load_problems(data)
    system = {"role": "system", "content": "Be brief."}
    assert train == [
        Problem(id="7", messages=[system, *chat]),
        Problem(id="x", messages=[system, {"role": "user", "content": "d"}]),
    ]
    assert held_out == []


def test_blank_lines_do_not_shift_the_default_ids(tmp_path):
    train, _ = load_problems(from_file(jsonl(tmp_path, {"prompt": "a"}, "", "  ", {"prompt": "b"})))
    assert [p.id for p in train] == ["data.jsonl:1", "data.jsonl:4"]


def test_a_held_out_question_is_not_trained_on(tmp_path, caplog):
    rows = [{"prompt": q} for q in ("a", "b", "c", "a")]
    train, held_out = load_problems(from_file(jsonl(tmp_path, *rows), eval_size=1))
    assert (questions(train), questions(held_out)) == (["b", "c"], ["a"])
    assert "1 training problems dropped" in caplog.text


GOOD = {"prompt": "p", "answer": "a", "id": "1"}
BAD_LINES = {
    "not json": ('{"prompt": "p",}', {}, "data.jsonl:2: not a JSON line: "),
    "not utf-8": (b'{"prompt": "\xff"}', {}, "data.jsonl:2: not a JSON line: 'utf-8' codec"),
    "not an object": ('["p"]', {}, "data.jsonl:2: must be a JSON object, got list"),
    "no prompt": (
        {"question": "q", "answer": "a"},
        {},
        'data.jsonl:2: no field "prompt" (data.prompt_key); fields here: question, answer',
    ),
    "no fields": ("{}", {}, "fields here: none"),
    "prompt is null": ({"prompt": None}, {}, 'data.jsonl:2: "prompt" must be a text or a list'),
    "prompt is empty": ({"prompt": ""}, {}, "and not empty, got ''"),
    "chat is empty": ({"prompt": []}, {}, "and not empty, got []"),
    "bad role": (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "human", "content": "b"}]},
        {},
        'data.jsonl:2: "prompt"[1] must be {"role": system | user | assistant, "content": text}, got',
    ),
    "content is no text": ({"prompt": [{"role": "user", "content": 3}]}, {}, '"prompt"[0] must be'),
    "two system messages": (
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
        {"system_prompt": "t"},
        'data.jsonl:2: has a system message of its own; set data.system_prompt = ""',
    ),
    "answer is a list": (
        {"prompt": "p", "answer": ["a"]},
        {},
        "data.jsonl:2: \"answer\" must be a string or a number, got ['a']",
    ),
    "no id": (
        {"prompt": "p"},
        {"id_key": "id"},
        'data.jsonl:2: no field "id" (data.id_key); fields here: prompt',
    ),
    "id twice": (GOOD, {"id_key": "id"}, "data.jsonl:2: id '1' is taken by "),
}


@pytest.mark.parametrize(("line", "fields", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines(tmp_path, line, fields, message):
    with pytest.raises(ConfigError) as caught:
        load_problems(from_file(jsonl(tmp_path, GOOD, line), **fields))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_given_twice_names_both_places(tmp_path):
    with pytest.raises(ConfigError, match=r"data.jsonl:3: id '1' is taken by .*data.jsonl:1; ids must be"):
        load_problems(from_file(jsonl(tmp_path, GOOD, {**GOOD, "id": 2}, GOOD), id_key="id"))


def test_bad_rows_of_parquet_are_named(tmp_path):
    table = pa.Table.from_pylist([{"prompt": "a"}, {"prompt": None}])
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match=r'd.parquet: row 2: "prompt" must be a text'):
        load_problems(from_file(str(tmp_path / "d.parquet"), "parquet"))


def test_bad_files(tmp_path):
    def message(data: Data) -> str:
        with pytest.raises(ConfigError) as caught:
            load_problems(data)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    missing = str(tmp_path / "missing")
    assert message(from_file("")) == 'data.path is empty; data.source = "jsonl" needs a file or folder'
    assert message(from_file(missing)) == f"{missing}: no such file (data.path)"
    assert message(from_file(missing, "parquet")) == f"{missing}: no such file (data.path)"
    assert f"{missing}: no data set folder (data.path)" in message(from_file(missing, "hf"))
    assert f"{tmp_path}: no data set folder (data.path)" in message(from_file(str(tmp_path), "hf"))
    path = jsonl(tmp_path, "")
    assert message(from_file(path)) == f"{path}: no problems in it"
    assert f"{path}: not a Parquet file: " in message(from_file(path, "parquet"))
    path = jsonl(tmp_path, *ROWS)
    assert "data.eval_size = 10 leaves nothing to train on" in message(from_file(path, eval_size=10))
    assert "must not be negative" in message(from_file(path, eval_size=-1))
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "a"})
    assert "every training question is also held out" in message(from_file(path, eval_size=1))


# reasoning-gym


def test_reasoning_gym_is_deterministic_and_disjoint():
    data = Data(task="chain_sum", task_args={"max_terms": 2, "max_digits": 1}, size=40, eval_size=10)
    train, held_out = load_problems(data)
    assert (train, held_out) == load_problems(data)
    everything = train + held_out
    assert (len(train), len(held_out)) == (40, 10)
    assert len(set(questions(everything))) == len({p.id for p in everything}) == 50
    # Questions did repeat, or this would not test the removal of duplicates.
    assert everything[-1].id != "chain_sum/49"
    first = train[0]
    assert first.id == "chain_sum/0"
    assert first.answer == first.meta["entry"]["answer"]
    assert questions([first]) == [first.meta["entry"]["question"]]


def test_training_problems_do_not_depend_on_eval_size_and_seeds_differ():
    small = load_problems(Data(task="chain_sum", size=8, eval_size=0))[0]
    assert load_problems(Data(task="chain_sum", size=8, eval_size=8))[0] == small
    other = load_problems(Data(task="chain_sum", task_args={"seed": 10_000}, size=8, eval_size=0))[0]
    assert not set(questions(small)) & set(questions(other))


BAD_TASKS = {
    "unknown": ({"task": "chain_sun"}, 'data.task = "chain_sun"', 'did you mean "chain_sum"?'),
    "unknown argument": ({"task_args": {"terms": 3}}, "takes no 'terms' here; it takes:", "max_word_len"),
    "size as argument": ({"task_args": {"size": 3}}, "takes no 'size' here", "set data.size"),
    "refused": ({"task_args": {"min_word_len": 9, "max_word_len": 3}}, "refuses", "'min_word_len': 9"),
    "wrong type": ({"task_args": {"min_word_len": "x"}}, "refuses", "not supported between"),
    "fails later": (
        {"task": "countdown", "task_args": {"min_target": 10**12, "max_target": 10**12}},
        "fails at problem 0",
        "Failed to generate",
    ),
    "endless": ({"size": 0}, "data.size = 0", "set a number"),
    "exhausted": (
        {
            "task": "chain_sum",
            "task_args": {"max_terms": 1, "min_terms": 1, "max_digits": 1},
            "size": 9,
            "eval_size": 9,
        },
        "gave only 10 different questions in 180 draws",
        "ask for 18",
    ),
}


@pytest.mark.parametrize(("fields", "what", "remedy"), BAD_TASKS.values(), ids=BAD_TASKS)
def test_bad_tasks(fields, what, remedy):
    with pytest.raises(ConfigError) as caught:
        load_problems(Data(**fields))
    assert what in str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


# Tokens

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE, eos: str | None = "<eos>"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "<user>", "<assistant>", "one", "two", "three"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_encode_prompt_opens_the_response():
    assert encode_prompt(tiny_tokenizer(), user("one three")) == [2, 4, 6, 3]


def test_encode_prompts_names_the_problem_that_is_too_long():
    problems = [Problem(id="a", messages=user("one")), Problem(id="b", messages=user("one two"))]
    assert encode_prompts(tiny_tokenizer(), problems, max_prompt=4) == [[2, 4, 3], [2, 4, 5, 3]]
    with pytest.raises(
        ConfigError, match=r"problem b: its prompt has 4 tokens, at most 3 fit; raise model.max"
    ):
        encode_prompts(tiny_tokenizer(), problems, max_prompt=3)


def test_chat_templates_that_are_missing_or_refuse():
    with pytest.raises(ConfigError, match=r"no chat template; use an instruction-tuned model, or put"):
        encode_prompt(tiny_tokenizer(template=None), user("one"))
    with pytest.raises(ConfigError, match=r"refuses messages of roles system, user: no system here"):
        encode_prompt(tiny_tokenizer(), [{"role": "system", "content": "s"}, *user("one")])


def test_tokenizers_that_do_not_fit_the_model():
    check_tokenizer(tiny_tokenizer(), vocab_size=7)
    with pytest.raises(
        ConfigError, match=r"leads to token 6, but the model has tokens 0 to 5; .* model.source"
    ):
        check_tokenizer(tiny_tokenizer(), vocab_size=6)
    with pytest.raises(ConfigError, match=r"no end token; set eos_token in tokenizer_config.json"):
        check_tokenizer(tiny_tokenizer(eos=None), vocab_size=7)


# Order


def problems(n: int) -> list[Problem]:
    return [Problem(id=str(i), messages=user(str(i))) for i in range(n)]


def draws(order: ProblemOrder, sizes: list[int]) -> list[list[str]]:
    return [[p.id for p in order.next(n)] for n in sizes]


def test_every_epoch_is_another_permutation():
    epochs = draws(ProblemOrder(problems(7), seed=1), [7, 7, 7])
    assert all(Counter(epoch) == Counter(map(str, range(7))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_draw_never_repeats_a_problem_and_skips_the_rest_of_an_epoch():
    whole = draws(ProblemOrder(problems(7), seed=1), [7, 7])
    steps = draws(ProblemOrder(problems(7), seed=1), [3, 3, 3, 3])
    assert steps == [whole[0][:3], whole[0][3:6], whole[1][:3], whole[1][3:6]]
    with pytest.raises(ConfigError, match="a step asks for 8 problems, but there are only 7"):
        ProblemOrder(problems(7), seed=1).next(8)


def test_the_order_depends_on_the_seed_alone():
    assert draws(ProblemOrder(problems(9), seed=3), [9]) == draws(ProblemOrder(problems(9), seed=3), [9])
    assert draws(ProblemOrder(problems(9), seed=4), [9]) != draws(ProblemOrder(problems(9), seed=3), [9])


@pytest.mark.parametrize("before", [0, 1, 2, 3, 7])
def test_resume_is_exact(before):
    order = ProblemOrder(problems(5), seed=2)
    draws(order, [2] * before)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = ProblemOrder(problems(5), seed=2)
    resumed.load_state_dict(state)
    assert draws(resumed, [2] * 6) == draws(order, [2] * 6)


def test_resume_with_other_problems_is_refused():
    state = ProblemOrder(problems(5), seed=2).state_dict()
    for other in (ProblemOrder(problems(6), seed=2), ProblemOrder(problems(5), seed=3)):
        with pytest.raises(ConfigError, match=r"cannot resume .* restore the \[data\] settings"):
            other.load_state_dict(state)
