"""The two layouts that EAGLE-3 drafts are published in, and the names they differ by.

- eagle3: a flat Llama config.json and `midlayer.*`, as the EAGLE-3 authors, SGLang and vLLM have it. Our own.
- speculators: nested config.json of the `speculators` library and `layers.0.*`; vLLM reads it too.
"""

from __future__ import annotations

from typing import Any

from torchspec.drafts.base import Verifier
from torchspec.drafts.eagle3.spec import NORM_OUTPUT, Eagle3Spec
from torchspec.errors import ConfigError
from torchspec.models.config_json import ConfigJson

LAYOUTS = ("eagle3", "speculators")
SERVED_AS = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",  # the speculators layout; so is the next
    "Eagle3Speculator",
)
"""Values of `architectures` with which vLLM serves a checkpoint as this."""
SPECULATORS_VERSION = "0.9.0"
"""Of the schema written here."""


def config_json(spec: Eagle3Spec, layout: str, verifier: Verifier | None = None) -> dict[str, Any]:
    """config.json of a draft; speculators needs the verifier."""
    flat = spec.hf_config()
    if spec.norm_output and verifier is not None:  # for others to read, not for this run's own engine
        ConfigJson("draft export", {}).say_once(f"norm_output = true {NORM_OUTPUT}")
    if layout == "eagle3":
        return flat
    assert verifier is not None
    own = ("draft_vocab_size", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
    apart = (*own, "architectures", "eagle_config", "norm_before_residual")
    layer = {key: x for key, x in flat.items() if key not in apart}
    method = {"proposal_type": "greedy", "speculative_tokens": verifier.draft_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier.path, "architectures": [verifier.architecture]},
        },
        "transformer_layer_config": layer,
        **{key: flat[key] for key in own},
        "norm_before_residual": spec.norm_before_residual,  # vLLM takes a missing one for true
        "norm_before_fc": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def layout_of(config: dict[str, Any]) -> str:
    """Which layout a config.json has.

    Raises:
        ConfigError: a speculators checkpoint of another algorithm.
    """
    kind = config.get("speculators_model_type")
    if kind is None:
        return "eagle3"
    if kind != "eagle3":
        raise ConfigError(f"draft config.json: speculators_model_type = {kind!r}; only 'eagle3' is supported")
    return "speculators"


def spec_from_json(
    config: dict[str, Any], layers: int | None = None, where: object = "draft config.json"
) -> Eagle3Spec:
    """The inverse of `config_json`, for any checkpoint of either layout that `Eagle3Spec` can express.

    Raises:
        ConfigError: a key is missing, or asks for a variant that is not implemented.
    """
    _check_architecture(config, where)
    if layout_of(config) == "speculators":
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise ConfigError(f"{where}: transformer_layer_config is missing; is it a whole checkpoint?")
        own = {key: x for key, x in config.items() if key not in _SPECULATORS}
        # What is missing counts as vLLM counts it. Its layers may be of another vocabulary type: own keys win.
        layer = {key: x for key, x in layer.items() if key != "architectures"}
        config = {"norm_before_residual": True, **layer, **own}
    return Eagle3Spec.from_hf_config(config, layers, where)


_SPECULATORS = frozenset(
    {
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
        "model_type",
    }
)
"""Keys of that library which describe a file, not a model."""


def _check_architecture(config: dict[str, Any], where: object) -> None:
    """The EAGLE-3 authors wrote LlamaForCausalLM, as vLLM reads it too; others may have no such key."""
    names = config.get("architectures") or ["LlamaForCausalLM"]
    if names[0] not in (*SERVED_AS, "LlamaForCausalLM"):
        raise ConfigError(
            f"{where}: architecture {names[0]} is not supported; supported: {', '.join(SERVED_AS)}"
        )


def required_names(spec: Eagle3Spec) -> set[str]:
    """Names of the tensors that the loaders of the eagle3 layout need, and no others that they know."""
    layer = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    layer += ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    modules = ["fc", "norm", "lm_head", *(f"midlayer.{name}" for name in layer)]
    modules += [f"fc_norm.{i}" for i in range(len(spec.aux_layers))] if spec.fc_norm else []
    maps = {"d2t", "t2d"} if spec.draft_vocab_size != spec.vocab_size else set()
    return {f"{module}.weight" for module in modules} | maps


def renamed(name: str, layout: str) -> str:
    """A name of the eagle3 layout, as `layout` has it."""
    return name.replace("midlayer.", "layers.0.", 1) if layout == "speculators" else name


def engine_name(name: str) -> str:
    """The parameter of vLLM's model that a tensor of the eagle3 layout goes to."""
    return name if name.startswith("lm_head.") else f"model.{name.replace('midlayer.', 'layers.0.')}"
