"""Shape of an EAGLE-3(.1) draft: from [draft] and the policy, or from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchspec.config.schema import Draft
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec


def output_layer_ids(entering: Iterable[int]) -> list[int]:
    """Ids of taps in the other convention.

    Here, in vLLM and in speculators' files a tap has the id of the layer it *enters*; SGLang, SpecForge and
    ModelOpt (`eagle_config` in config.json) name the layer whose *output* it is, one less; -1: the embeddings.

    Example: output_layer_ids([2, 14, 25]) == [1, 13, 24]
    """
    return [i - 1 for i in entering]


def entering_layer_ids(outputs: Iterable[int]) -> list[int]:
    """The inverse of `output_layer_ids`."""
    return [i + 1 for i in outputs]


_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec:
    """Shape of an EAGLE-3 draft, a `drafts.base.DraftSpec`.

    `fc_norm` and `norm_output` make it EAGLE-3.1; both False is EAGLE-3.
    """

    arch: ClassVar[str] = "eagle3"
    vocab_size: int
    draft_vocab_size: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    max_len: int
    aux_layers: tuple[int, int, int]
    fc_norm: bool
    norm_output: bool

    @property
    def trunk_width(self) -> int:
        """Elements per row: keys and values of the one layer."""
        return 2 * self.kv_heads * self.head_dim

    def hf_config(self) -> dict[str, Any]:
        """config.json of a checkpoint that vLLM loads as its `eagle3` drafter."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": False,
            _IDS: list(self.aux_layers),  # vLLM looks here first, SGLang only below
            "eagle_config": {"use_aux_hidden_state": True, _IDS: output_layer_ids(self.aux_layers)},
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> Eagle3Spec:
        """The inverse of `hf_config`, for any EAGLE-3 config.json whose model this class can express.

        Raises:
            ConfigError: a key is missing, or asks for a variant that is not implemented.
        """
        nested = dict(config.get("eagle_config") or {})
        if _IDS in nested:
            nested[_IDS] = entering_layer_ids(nested[_IDS])
        config = {**nested, **config}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        try:
            only = {**_ONLY_SUPPORTED, "target_hidden_size": config["hidden_size"]}
            for key, found in {**config, "rope_type": rope_type}.items():
                if key in only and found != only[key]:
                    raise ConfigError(
                        f"draft config.json: {key} = {found!r}; only {only[key]!r} is supported"
                    )
            return cls(
                vocab_size=config["vocab_size"],
                draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
                dim=config["hidden_size"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                ffn_dim=config["intermediate_size"],
                norm_eps=config["rms_norm_eps"],
                rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]),
                max_len=config["max_position_embeddings"],
                aux_layers=tuple(config[_IDS]),
                fc_norm=config.get("fc_norm", False),
                norm_output=config.get("norm_output", False),
            )
        except KeyError as error:
            raise ConfigError(
                f"draft config.json: {error.args[0]} is missing; add it if this is an EAGLE-3 checkpoint"
            ) from None


_ONLY_SUPPORTED: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
    "rope_type": "default",
}


def make_spec(settings: Draft, policy: PolicySpec) -> Eagle3Spec:
    """Return the policy's shape but for what [draft] says.

    Raises:
        ConfigError: there can be no such draft for this policy.
    """
    heads, kv_heads = settings.heads or policy.heads, settings.kv_heads or policy.kv_heads
    if heads % kv_heads:
        raise ConfigError(f"draft: {heads} heads are not a multiple of {kv_heads} kv_heads")
    return Eagle3Spec(
        vocab_size=policy.vocab_size,
        draft_vocab_size=settings.vocab_size or policy.vocab_size,
        dim=policy.dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=policy.head_dim,
        ffn_dim=settings.ffn_dim or policy.ffn_dim,
        norm_eps=policy.norm_eps,
        rope_theta=policy.rope_theta,
        max_len=policy.max_len,
        aux_layers=_checked_layers(settings.aux_layers or default_layers(policy.layers), policy.layers),
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )


def check_spec(spec: Eagle3Spec, policy: PolicySpec) -> None:
    """Raise a ConfigError if a draft taps layers that the policy does not have."""
    _checked_layers(spec.aux_layers, policy.layers)


def default_layers(layers: int) -> tuple[int, int, int]:
    """Return the taps of vLLM and of EAGLE-3 for a policy of `layers` layers."""
    return 2, layers // 2, layers - 3


def _checked_layers(ids: Sequence[int], layers: int) -> tuple[int, int, int]:
    if len(ids) != 3 or not 0 <= ids[0] < ids[1] < ids[2] <= layers:
        raise ConfigError(
            f"draft.aux_layers = {list(ids)} must be three ascending ids from 0 to {layers}, the "
            f"number of layers; the default 2, L//2, L-3 needs a policy of at least 7"
        )
    return ids[0], ids[1], ids[2]
