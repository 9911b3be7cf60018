"""What a policy is, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchspec.errors import ConfigError
from torchspec.models.config_json import ConfigJson, Rope

ARCHITECTURES: dict[str, Literal["qwen3", "llama3"]] = {
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama3",
}


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
        config, arch = ConfigJson(path, hf), ARCHITECTURES[names[0]]
        rope = _check_variants(config, arch)
        heads, dim = config.integer("num_attention_heads"), config.integer("hidden_size")
        positions = config.integer("max_position_embeddings", 32768 if arch == "qwen3" else 2048)
        spec = cls(
            arch=arch,
            vocab_size=config.integer("vocab_size"),
            dim=dim,
            layers=config.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=config.integer("num_key_value_heads", 32 if arch == "qwen3" else heads),
            head_dim=config.integer(
                "head_dim", 128 if arch == "qwen3" else dim // heads, quiet=arch == "llama3"
            ),
            ffn_dim=config.integer("intermediate_size"),
            norm_eps=config.number("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            tied=config.flag("tie_word_embeddings", False),
            max_len=max_len or positions,
        )
        config.finish()
        if spec.heads % spec.kv_heads:
            raise ConfigError(
                f"{path}: {heads} attention heads are no multiple of {spec.kv_heads} key/value heads"
            )
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


def _check_variants(config: ConfigJson, arch: str) -> Rope:
    """Refuse what a config may switch on that our model definitions do not compute; return its rotary embedding."""
    config.full_attention()
    config.only(model_type="llama" if arch == "llama3" else arch, hidden_act="silu")
    config.only(attention_bias=False, mlp_bias=False)
    for name in ("quantization_config", "compression_config"):
        if name in config.values:
            raise ConfigError(f"{config.where}: {name} is not supported; use an unquantised model")
    rope = config.rope()
    if rope.partial != 1:
        config.refuse("partial_rotary_factor", "only whole heads are rotated in a policy")
    if rope.scaling and arch != "llama3":
        raise ConfigError(
            f"{config.where}: RoPE scaling 'llama3' is not supported here; use no scaling, or LlamaForCausalLM"
        )
    return rope
