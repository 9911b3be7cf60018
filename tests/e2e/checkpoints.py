"""Tiny Hugging Face folders for the vLLM tests, written without torchspec's own model code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchspec.config.schema import Config
from torchspec.rollout.engine import Request

VOCAB = 40  # small, so that even a random draft is accepted now and then
DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 5, 4, 2, 32, 128
MAX_POSITIONS = 320
END_TOKEN = 0
AUX_LAYERS = (1, 2, 3)
ROPE_THETA = 1e6
NORM_EPS = 1e-6


def write_policy(folder: Path, seed: int, tied: bool = False) -> Path:
    """A random Qwen3 with a word-level tokenizer; logits are scaled so that its entropy is moderate."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=DIM,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_POSITIONS,
            rope_theta=ROPE_THETA,
            rms_norm_eps=NORM_EPS,
            tie_word_embeddings=tied,
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=END_TOKEN,
            pad_token_id=1,
        )
    ).float()
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<end>": END_TOKEN, "<pad>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def draft_weights(seed: int, *, draft_vocab: int = VOCAB, fc_norm: bool = True) -> dict[str, torch.Tensor]:
    """A random EAGLE-3 draft under the names that vLLM reads; fp32."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def gain() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(DIM, generator=generator)

    weights = {
        "fc.weight": matrix(DIM, 3 * DIM),
        "midlayer.input_layernorm.weight": gain(),
        "midlayer.hidden_norm.weight": gain(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * DIM),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * DIM),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * DIM),
        "midlayer.self_attn.o_proj.weight": matrix(DIM, HEADS * HEAD_DIM),
        "midlayer.post_attention_layernorm.weight": gain(),
        "midlayer.mlp.gate_proj.weight": matrix(FFN, DIM),
        "midlayer.mlp.up_proj.weight": matrix(FFN, DIM),
        "midlayer.mlp.down_proj.weight": matrix(DIM, FFN),
        "norm.weight": gain(),
        "lm_head.weight": 2 * matrix(draft_vocab, DIM),
    }
    if fc_norm:
        weights |= {f"fc_norm.{i}.weight": gain() for i in range(3)}
    if draft_vocab != VOCAB:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = kept - torch.arange(draft_vocab)
    return weights


def write_draft(
    folder: Path,
    weights: dict[str, torch.Tensor],
    *,
    fc_norm: bool = True,
    norm_output: bool = True,
    **more: object,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": weights["lm_head.weight"].shape[0],
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def prompts(count: int, seed: int, shortest: int = 4, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    return [torch.randint(2, VOCAB, (int(n),), generator=generator).tolist() for n in lengths]


def engine_config(max_len: int = 256, num_draft_tokens: int = 3, **rollout: object) -> Config:
    config = Config()
    config.model.max_len = max_len
    config.rollout.num_draft_tokens = num_draft_tokens
    config.rollout.kv_cache_gb = 0.05
    config.budget.rule = "unlimited"
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


def requests(count: int, seed: int, samples: int = 1, **lengths: int) -> list[Request]:
    return [
        Request(problem_id=f"p{i}", prompt_tokens=prompt, samples=samples)
        for i, prompt in enumerate(prompts(count, seed, **lengths))
    ]
