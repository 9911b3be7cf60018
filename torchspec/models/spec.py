"""What a policy is, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchspec.errors import ConfigError

ARCHITECTURES: dict[str, Literal["qwen3", "llama3"]] = {
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama3",
}
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Shape of a dense decoder-only policy.

    `rope_scaling` is None or Llama 3.1's four numbers under their Hugging Face names; `max_len` is the
    longest document in tokens. `ffn_dim` is the hidden width of the gated feed-forward.

    Example, Qwen3-0.6B:
        PolicySpec(arch="qwen3", vocab_size=151936, dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128,
                   ffn_dim=3072, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, tied=True, max_len=40960)
    """

    arch: Literal["qwen3", "llama3"]
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float] | None
    tied: bool
    max_len: int

    @classmethod
    def from_hf(cls, folder: str | Path, max_len: int | None = None) -> PolicySpec:
        """Read `folder`/config.json; `max_len` asks for fewer positions than the model has.

        Raises:
            ConfigError: no or broken config.json, an architecture or a variant that is not supported, or
                more positions than the model was made for.
        """
        path = Path(folder) / "config.json"
        hf = read_json(path)
        names = hf.get("architectures") or ["none"]
        if names[0] not in ARCHITECTURES:
            raise ConfigError(
                f"{path}: architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        _refuse_variants(path, hf)
        try:
            positions = hf["max_position_embeddings"]
            theta, scaling = _rope(path, hf)
            spec = cls(
                arch=ARCHITECTURES[names[0]],
                vocab_size=hf["vocab_size"],
                dim=hf["hidden_size"],
                layers=hf["num_hidden_layers"],
                heads=hf["num_attention_heads"],
                kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
                head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
                ffn_dim=hf["intermediate_size"],
                norm_eps=hf["rms_norm_eps"],
                rope_theta=float(theta),
                rope_scaling=scaling,
                tied=hf.get("tie_word_embeddings", False),
                max_len=max_len or positions,
            )
        except KeyError as error:
            raise ConfigError(f"{path}: key {error} is missing; is this a full checkpoint folder?") from None
        if spec.max_len > positions:
            raise ConfigError(
                f"model.max_len = {spec.max_len} is more than the {positions} positions of {folder} "
                f"(max_position_embeddings); lower model.max_len"
            )
        return spec


def read_json(path: Path, key: str = "model.source") -> dict[str, Any]:
    """A file of the checkpoint folder that `key` names; a ConfigError where it is missing or broken."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is missing; give a folder in Hugging Face layout")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


def _refuse_variants(path: Path, hf: dict[str, Any]) -> None:
    """Things a config may switch on that our model definitions do not compute."""
    variants = {
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        "sliding_window": hf.get("use_sliding_window", hf.get("sliding_window") is not None),
        "quantization_config": hf.get("quantization_config") is not None,
    }
    for name, active in variants.items():
        if active:
            raise ConfigError(
                f"{path}: {name} is not supported; use a dense, unquantised model with full attention"
            )
    if (act := hf.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{path}: hidden_act = {act} is not supported; only silu is")


def _rope(path: Path, hf: dict[str, Any]) -> tuple[float, dict[str, float] | None]:
    """RoPE base and scaling; transformers 5 keeps both in rope_parameters, older files apart."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = rope["rope_theta"] if "rope_theta" in rope else hf["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3" and ARCHITECTURES[hf["architectures"][0]] == "llama3":
        return theta, {name: rope[name] for name in LLAMA3_SCALING}
    raise ConfigError(
        f"{path}: RoPE scaling {kind!r} is not supported here; use no scaling, or llama3 with LlamaForCausalLM"
    )
