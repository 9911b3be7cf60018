"""A small random policy with a character tokenizer, as a complete Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from torchspec.config.schema import TinyModel
from torchspec.models.hf import new_folder, write_json, write_tensors
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
CHARACTERS = ("\n", *map(chr, range(32, 127)))
# Every character is a token: one letter names the role (s, u, a), and no newlines are spent on layout.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'][0] }}}}{{{{ message['content'] }}}}{END}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}a{{% endif %}}"
)


def make_tiny(folder: str | Path, tiny: TinyModel, max_len: int, seed: int) -> None:
    """Write a random policy of the Qwen3 architecture: config, weights, tokenizer, chat template.

    The tokenizer knows newline and printable ASCII; encoding anything else raises.

    Raises:
        ConfigError: `folder` exists.
    """
    spec = tiny_spec(tiny, max_len)
    policy = Policy(spec)
    policy.init_weights(seed)
    with new_folder(Path(folder)) as partial:
        write_tokenizer(partial, max_len)
        write_json(partial / "config.json", _hf_config(spec))
        end = SPECIAL.index(END)
        write_json(partial / "generation_config.json", {"eos_token_id": end, "pad_token_id": 0})
        write_tensors(partial, policy.hf_weights())


def tiny_spec(tiny: TinyModel, max_len: int) -> PolicySpec:
    """The shape of the tiny policy; its vocabulary is padded to a multiple of 8."""
    tokens = len(SPECIAL) + len(CHARACTERS)
    return PolicySpec(
        arch="qwen3",
        vocab_size=-(-tokens // 8) * 8,
        dim=tiny.dim,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        ffn_dim=tiny.ffn_dim,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=tiny.tied,
        max_len=max_len,
    )


def write_tokenizer(folder: Path, max_len: int) -> None:
    """Write the character tokenizer and its chat template into `folder`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab))  # no unknown token: other characters raise
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _hf_config(spec: PolicySpec) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index(END),
        "pad_token_id": SPECIAL.index(PAD),
        "dtype": "float32",
    }
