"""The tiny policy is a checkpoint folder that transformers loads like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from torchspec.config.schema import TinyModel
from torchspec.errors import ConfigError
from torchspec.models import hf, tiny
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, SamplingLaw

SHAPE = TinyModel(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, tied=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "policy"
    tiny.make_tiny(folder, SHAPE, max_len=64, seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_every_character_is_one_token(tokenizer) -> None:
    text = "".join(tiny.CHARACTERS) + "  two  spaces\n\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(tiny.SPECIAL) + len(tiny.CHARACTERS) == 99
    assert tokenizer.eos_token == tiny.END
    assert tokenizer.pad_token == tiny.PAD
    with pytest.raises(Exception, match="UNK"):
        tokenizer("caf\u00e9")


def test_chat_template(tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    start, end = tokenizer.convert_tokens_to_ids([tiny.START, tiny.END])
    letters = [tokenizer.convert_tokens_to_ids(list(text)) for text in ("sBe brief.", "uHi", "a")]
    assert ids == [start, *letters[0], end, start, *letters[1], end, start, *letters[2]]
    answered = [*messages, {"role": "assistant", "content": "Yo"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False).endswith("<|im_start|>aYo<|im_end|>")


def test_transformers_computes_the_same(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size % 8 == 0
    assert model.generation_config.eos_token_id == tiny.SPECIAL.index(tiny.END)
    spec = PolicySpec.from_hf(folder)
    assert spec == tiny.tiny_spec(SHAPE, 64)
    policy = Policy(spec)
    hf.load_hf(policy, folder)
    tokens = torch.randint(0, 99, (40,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) < 39
    batch = Batch(
        tokens=tokens,
        positions=torch.arange(40),
        targets=tokens.roll(-1),
        target_mask=mask,
        rollout_logprobs=torch.zeros(40),
        advantages=torch.zeros(40),
        chain=torch.zeros(40, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 40], dtype=torch.int32),
    )
    with torch.no_grad():
        want = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        got = policy(batch, law=SamplingLaw(temperature=1.0), logprob_rows=8).logprobs[:-1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_seed_and_existing_folder(folder: Path, tmp_path: Path) -> None:
    tiny.make_tiny(tmp_path / "same", SHAPE, max_len=64, seed=1)
    tiny.make_tiny(tmp_path / "other", SHAPE, max_len=64, seed=2)
    weights = [
        (path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "same", tmp_path / "other")
    ]
    assert weights[0] == weights[1] != weights[2]
    with pytest.raises(ConfigError, match="exists already"):
        tiny.make_tiny(folder, SHAPE, max_len=64, seed=1)
