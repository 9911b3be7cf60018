"""Shape of an EAGLE-3(.1) draft: from [draft] and the policy, or from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchspec.config.schema import Draft
from torchspec.errors import ConfigError
from torchspec.models.config_json import ConfigJson
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
    aux_layers: tuple[int, ...]
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool = False
    """The residual stream starts after `hidden_norm`, as in drafts of the speculators library."""
    rope_scaling: dict[str, float] | None = None
    """Llama 3.1's four numbers under their Hugging Face names."""
    partial_rotary_factor: float = 1.0
    window: int | None = None
    """Positions back that a row sees, itself included; None: all."""

    @property
    def rotary_dim(self) -> int:
        """How many of a head's elements are rotated: the first."""
        return int(self.head_dim * self.partial_rotary_factor)

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
            **self._rope_variants(),
            **self._window(),
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": False,
            _IDS: list(self.aux_layers),  # vLLM looks here first, SGLang only below
            "eagle_config": {"use_aux_hidden_state": True, _IDS: output_layer_ids(self.aux_layers)},
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            **({"norm_before_residual": True} if self.norm_before_residual else {}),
        }

    def _rope_variants(self) -> dict[str, Any]:
        """Both spellings: transformers reads rope_scaling and rope_theta into rope_parameters."""
        found: dict[str, Any] = {}
        if self.rope_scaling:
            found["rope_scaling"] = {"rope_type": "llama3", **self.rope_scaling}
        if self.partial_rotary_factor != 1:
            found["partial_rotary_factor"] = self.partial_rotary_factor
        return found

    def _window(self) -> dict[str, Any]:
        """All spellings: vLLM reads layer_types, other tools use_sliding_window."""
        if self.window is None:
            return {}
        kind = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
        return {**kind, "sliding_window": self.window}

    @classmethod
    def from_hf_config(
        cls, config: dict[str, Any], layers: int | None = None, where: object = "draft config.json"
    ) -> Eagle3Spec:
        """The inverse of `hf_config`, for any EAGLE-3 config.json whose model this class can express.

        Args:
            config: a flat config.json, as the EAGLE-3 authors, SGLang, ModelOpt and vLLM have it.
            layers: of the policy, for the default taps; None: the file must have them.
            where: the file, for messages.

        Raises:
            ConfigError: a key is missing, of a wrong type, not known, or asks for a variant that is not
                implemented.
        """
        file = ConfigJson(where, config)
        _check_variants(file)
        rope, nested = file.rope(), ConfigJson(f"{where}: eagle_config", file.section("eagle_config"))
        nested.only(use_aux_hidden_state=True, norm_before_fc=False, **_MODEL_OPT)
        outputs = nested.integers(_IDS)
        aux = file.integers(_IDS) or entering_layer_ids(outputs)
        nested.finish()
        if not aux:
            if layers is None:
                raise ConfigError(f"{where}: key {_IDS!r} is missing")
            aux = default_layers(layers)
            file.say_once(f"{_IDS} is absent; layers {', '.join(map(str, aux))} are tapped, as vLLM does")
        vocab_size, dim = file.integer("vocab_size"), file.integer("hidden_size")
        heads = file.integer("num_attention_heads")
        file.only(target_hidden_size=dim, num_aux_hidden_states=len(aux))
        spec = cls(
            vocab_size=vocab_size,
            draft_vocab_size=file.integer("draft_vocab_size", vocab_size, quiet=True),
            dim=dim,
            heads=heads,
            kv_heads=file.integer("num_key_value_heads", heads),
            head_dim=file.integer("head_dim", dim // heads, quiet=True),
            ffn_dim=file.integer("intermediate_size"),
            norm_eps=file.number("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            partial_rotary_factor=rope.partial,
            window=file.window(),
            max_len=file.integer("max_position_embeddings", 2048),
            aux_layers=tuple(aux),
            fc_norm=file.flag("fc_norm", False),
            norm_output=file.flag("norm_output", False),
            norm_before_residual=file.flag("norm_before_residual", False),
        )
        if spec.norm_output:
            file.say_once(f"norm_output = true {NORM_OUTPUT}")
        file.finish(_HARMLESS)
        _check_shape(spec, where)
        return spec


NORM_OUTPUT = (
    "means that the normed hidden state goes on to the next pass, as in vLLM and in EAGLE-3.1; "
    "SpecForge has another meaning for this key"
)
_MODEL_OPT: dict[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "num_hidden_layers": 1,
    "has_lm_head": True,
}
"""What ModelOpt writes into eagle_config, with the values of the model that vLLM serves."""
_HARMLESS = frozenset({"tie_word_embeddings", "embed_requires_grad", "target_model_type"})
"""Whether embeddings and head are shared is decided by the weights that are there."""


def _check_variants(file: ConfigJson) -> None:
    """Refuse what a config.json may switch on that `Eagle3` does not compute."""
    file.only(
        model_type="llama", num_hidden_layers=1, hidden_act="silu", attention_bias=False, mlp_bias=False
    )
    file.only(norm_before_fc=False, logit_scale=1.0, use_aux_hidden_state=True)
    if "quantization_config" in file.values:
        raise ConfigError(f"{file.where}: quantization_config is not supported; use an unquantised draft")


def _check_shape(spec: Eagle3Spec, where: object) -> None:
    if spec.heads % spec.kv_heads:
        raise ConfigError(
            f"{where}: {spec.heads} attention heads are no multiple of {spec.kv_heads} key/value heads"
        )
    if spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= spec.head_dim:
        raise ConfigError(
            f"{where}: partial_rotary_factor {spec.partial_rotary_factor} of a head of {spec.head_dim} is not an "
            f"even number of elements"
        )


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
    _checked_layers(spec.aux_layers, policy.layers, _IDS)


def default_layers(layers: int) -> tuple[int, int, int]:
    """Return the taps of vLLM and of EAGLE-3 for a policy of `layers` layers."""
    return 2, layers // 2, layers - 3


def _checked_layers(ids: Sequence[int], layers: int, name: str = "draft.aux_layers") -> tuple[int, int, int]:
    if len(ids) != 3 or not 0 <= ids[0] < ids[1] < ids[2] <= layers:
        raise ConfigError(
            f"{name} = {list(ids)} must be three ascending ids from 0 to {layers}, the "
            f"number of layers; the default 2, L//2, L-3 needs a policy of at least 7"
        )
    return ids[0], ids[1], ids[2]
