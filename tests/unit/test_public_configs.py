"""Published config.json files of drafts and policies, with small sizes: each loads, or is refused for a fitting reason.

Keys and values are as published; hidden sizes, vocabularies and layers are scaled down.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torchspec.config.schema import Config
from torchspec.drafts import registry
from torchspec.drafts.build import draft_spec, load_draft
from torchspec.drafts.eagle3.checkpoint import layout_of, renamed
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.vocab import build_d2t
from torchspec.errors import ConfigError
from torchspec.models.config_json import LLAMA3_SCALING
from torchspec.models.spec import PolicySpec

VOCAB = 96
COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
    "vocab_size": VOCAB,
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "hidden_act": "silu"}
GQA = {"num_key_value_heads": 2}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
DEFAULT_IDS = (2, 6, 9)  # of a policy of 12 layers

# ------------------------------------------------------------------------------------------------ drafts
EAGLE = {
    **COMMON,
    **SIZES,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
}
FORGE = {
    **EAGLE,
    **GQA,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "max_window_layers": 48,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "draft_vocab_size": 64,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
}
MODEL_OPT = {
    "eagle_aux_hidden_state_layer_ids": [],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
SPECULATORS_LAYER = {
    **{key: FORGE[key] for key in (*SIZES, *GQA, "head_dim", "mlp_bias", "attention_bias", "pretraining_tp")},
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE,
    "vocab_size": VOCAB,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 64,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev14",
    "target_hidden_size": None,
    "torch_dtype": "float32",
    "transformer_layer_config": SPECULATORS_LAYER,
    "transformers_version": "4.53.3",
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: x for key, x in config.items() if key not in names}


LOADED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "EAGLE authors, Llama 3.1 8B",
        {**EAGLE, **GQA, "draft_vocab_size": 64},
        {"kv_heads": 2, "rope_theta": 1e4},
    ),
    (
        "EAGLE authors, Vicuna 13B",
        {**EAGLE, "draft_vocab_size": 64},
        {"kv_heads": 4, "aux_layers": DEFAULT_IDS},
    ),
    (
        "EAGLE authors, R1 Distill",
        {**EAGLE, **GQA, "architectures": ["LlamaForCausalLM"]},
        {"draft_vocab_size": 96},
    ),
    ("EAGLE authors, Llama 3.3 70B", {**EAGLE, **GQA, "rms_norm_eps": 1e-6}, {"norm_eps": 1e-6}),
    (
        "SpecForge, Llama 4 Scout",
        {**FORGE, "rope_theta": 500000.0},
        {"rope_theta": 5e5, "norm_output": False},
    ),
    ("SpecForge, Qwen3 8B", FORGE, {"draft_vocab_size": 64, "rope_theta": 1e6, "fc_norm": False}),
    ("SpecForge, Qwen3 30B-A3B", {**FORGE, "head_dim": 16}, {"head_dim": 16}),
    (
        "SpecForge, gpt-oss 20B",
        {
            **FORGE,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 5, 9]},
        },
        {"aux_layers": (2, 6, 10)},
    ),
    ("a window", {**FORGE, "sliding_window": 2048, "use_sliding_window": True}, {"window": 2048}),
    ("window by type", {**FORGE, "layer_types": ["sliding_attention"], "sliding_window": 9}, {"window": 9}),
    (
        "a window not used",
        {**FORGE, "layer_types": ["full_attention"], "sliding_window": 9},
        {"window": None},
    ),
    ("SGLang, with target_model_type", {**FORGE, "target_model_type": "qwen3"}, {}),
    ("ModelOpt, gpt-oss 120B", {**FORGE, "eagle_config": MODEL_OPT}, {"aux_layers": DEFAULT_IDS}),
    (
        "ModelOpt, Llama 3.3",
        {**FORGE, "rope_scaling": LLAMA3_ROPE, "eagle_config": {**MODEL_OPT, "parallel_draft_step": 1}},
        {"rope_scaling": {name: float(LLAMA3_ROPE[name]) for name in LLAMA3_SCALING}},
    ),
    ("AngelSlim, Qwen3 32B", without(FORGE, "rope_scaling", "sliding_window"), {}),
    ("AngelSlim, Hunyuan", {**FORGE, "rope_theta": 10000.0, "num_key_value_heads": 4}, {"kv_heads": 4}),
    ("RedHatAI, Llama 3.1 8B", SPECULATORS, {"norm_before_residual": True, "rope_theta": 5e5}),
    (
        "RedHatAI, Qwen3 8B",
        {
            **SPECULATORS,
            "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
            "transformer_layer_config": without(SPECULATORS_LAYER, "rope_scaling") | {"rope_theta": 1000000},
        },
        {"aux_layers": (2, 6, 9), "rope_scaling": None},
    ),
    (
        "speculators 0.4, transformers 5",
        {
            **SPECULATORS,
            "architectures": ["Eagle3DraftModel"],
            "fc_norm": False,
            "norm_before_fc": False,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "transformer_layer_config": without(SPECULATORS_LAYER, "rope_scaling", "rope_theta")
            | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "layer_types": ["full_attention"],
            },
        },
        {"rope_theta": 5e5},
    ),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("P-EAGLE", {**FORGE, "mask_token_id": 7}, "mask_token_id = 7 is not allowed; this key is not known"),
    ("two layers", {**FORGE, "num_hidden_layers": 2}, "num_hidden_layers = 2; only 1"),
    (
        "DeepSeek",
        {**FORGE, "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        "Eagle3DeepseekV2ForCausalLM is not",
    ),
    ("Qwen3 layer", {**FORGE, "model_type": "qwen3"}, "model_type = 'qwen3'; only 'llama'"),
    (
        "EAGLE-1",
        {**FORGE, "architectures": ["EagleLlamaForCausalLM"]},
        "EagleLlamaForCausalLM is not supported",
    ),
    ("yarn", {**FORGE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not"),
    (
        "window of no size",
        {**FORGE, "use_sliding_window": True},
        "sliding_window = None is not allowed; a sliding window needs",
    ),
    (
        "two kinds of layers",
        {**FORGE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
        "layer_types",
    ),
    (
        "a window that nobody says is used",
        without(FORGE, "use_sliding_window") | {"sliding_window": 9},
        "window = 9",
    ),
    ("biases", {**FORGE, "attention_bias": True}, "attention_bias = True; only False"),
    ("first norm", {**SPECULATORS, "norm_before_fc": True}, "norm_before_fc = True; only False"),
    ("one tap", {**FORGE, "eagle_aux_hidden_state_layer_ids": [9]}, r"\[9\] must be three ascending ids"),
    (
        "a plain EAGLE head",
        {**FORGE, "use_aux_hidden_state": False},
        "use_aux_hidden_state = False; only True",
    ),
    (
        "parallel steps",
        {**FORGE, "eagle_config": {**MODEL_OPT, "parallel_draft_step": 4}},
        "parallel_draft_step = 4",
    ),
    ("unknown number", {**FORGE, "logits_scaling": 8.0}, "logits_scaling = 8.0 is not allowed"),
    (
        "text for a number",
        {**FORGE, "hidden_size": "32"},
        "hidden_size = '32' is not allowed; a whole number",
    ),
    ("ids as text", {**FORGE, "eagle_aux_hidden_state_layer_ids": ["2"]}, "a list of whole numbers"),
    ("two thetas", {**FORGE, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta = 1000000 is not allowed"),
    ("odd heads", {**FORGE, "num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
    ("quantised", {**FORGE, "quantization_config": {"quant_method": "fp8"}}, "quantization_config is not"),
    ("dflash", {**SPECULATORS, "speculators_model_type": "dflash"}, "'dflash'; only 'eagle3'"),
]

# ---------------------------------------------------------------------------------------------- policies
QWEN3 = {
    **COMMON,
    **SIZES,
    **GQA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_hidden_layers": 12,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
}
LLAMA = {
    **COMMON,
    **SIZES,
    **GQA,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 12,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
POLICIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Qwen3 0.6B", QWEN3, {"tied": True, "head_dim": 16, "rope_theta": 1e6}),
    ("Qwen3 8B", {**QWEN3, "tie_word_embeddings": False}, {"tied": False}),
    ("Qwen3 32B", {**QWEN3, "max_window_layers": 64, "num_key_value_heads": 1}, {"kv_heads": 1}),
    (
        "Qwen3 4B 2507",
        {**QWEN3, "rope_theta": 5000000, "max_position_embeddings": 262144},
        {"rope_theta": 5e6},
    ),
    (
        "Qwen3, transformers 5",
        without(QWEN3, "rope_scaling", "rope_theta")
        | {
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "layer_types": ["full_attention"] * 12,
        },
        {"rope_theta": 1e6},
    ),
    ("Llama 3.1 8B", LLAMA, {"head_dim": 8, "tied": False}),
    ("Llama 3.2 1B", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}, {"tied": True}),
    ("Llama 3.3 70B", LLAMA, {"kv_heads": 2}),
    ("Llama 3 8B, unsloth", {**LLAMA, "rope_scaling": None, "unsloth_fixed": True}, {"rope_scaling": None}),
    (
        "SmolLM2",
        {
            **LLAMA,
            "rope_scaling": None,
            "rope_interleaved": False,
            "is_llama_config": True,
            "transformers.js_config": {},
        },
        {},
    ),
]
NO_POLICIES: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen2.5", {**QWEN3, "architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM is not supported"),
    ("Mistral", {**LLAMA, "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported"),
    ("Gemma 3", {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM is not supported"),
    ("Phi-3", {**LLAMA, "architectures": ["Phi3ForCausalLM"]}, "Phi3ForCausalLM is not supported"),
    ("DeepSeek V3", {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM is not"),
    (
        "Qwen3 MoE",
        {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"]},
        "Qwen3MoeForCausalLM is not supported",
    ),
    ("gpt-oss", {**LLAMA, "architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM is not supported"),
    ("Qwen3 with yarn", {**QWEN3, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
    ("Qwen3 fp8", {**QWEN3, "quantization_config": {"quant_method": "fp8"}}, "quantization_config is not"),
    ("a window", {**QWEN3, "use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True"),
    ("Llama with biases", {**LLAMA, "mlp_bias": True}, "mlp_bias = True; only False"),
    ("muP", {**LLAMA, "residual_multiplier": 0.22}, "residual_multiplier = 0.22 is not allowed"),
    ("partial rotary", {**LLAMA, "partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not"),
    ("no width", without(LLAMA, "hidden_size"), "key 'hidden_size' is missing"),
]


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> PolicySpec:
    return PolicySpec.from_hf(written(tmp_path_factory.mktemp("p") / "policy", QWEN3), 64)


def settings(folder: Path) -> Config:
    config = Config()
    config.draft.init = str(folder)
    return config


@pytest.mark.parametrize(("name", "config", "expected"), LOADED, ids=[name for name, *_ in LOADED])
def test_a_published_draft_loads(name, config, expected, tmp_path, policy) -> None:
    folder = written(tmp_path / "draft", config)
    spec: Any = draft_spec(settings(folder), policy)
    assert {key: getattr(spec, key) for key in expected} == expected
    counts = torch.arange(VOCAB)
    d2t = None if spec.draft_vocab_size == VOCAB else build_d2t(counts, spec.draft_vocab_size)
    draft = Eagle3(spec, d2t)
    layout = layout_of(config)
    weights = {
        renamed(n, layout): torch.randn_like(x) if n.endswith("weight") else x for n, x in draft.hf_weights()
    }
    save_file(weights, folder / "model.safetensors")
    load_draft(draft, folder)
    assert all(torch.equal(x, weights[renamed(n, layout)]) for n, x in draft.hf_weights())
    again = registry.get("eagle3").spec_from_json(spec.hf_config(), 12, "here")
    assert again == spec  # what the engine gets says the same


@pytest.mark.parametrize(("name", "config", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_draft_that_is_another_model_is_refused_by_name(name, config, message, tmp_path, policy) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        draft_spec(settings(written(tmp_path / "draft", config)), policy)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "config", "expected"), POLICIES, ids=[name for name, *_ in POLICIES])
def test_a_published_policy_loads(name, config, expected, tmp_path) -> None:
    spec = PolicySpec.from_hf(written(tmp_path / "policy", config))
    assert {key: getattr(spec, key) for key in expected} == expected


@pytest.mark.parametrize(("name", "config", "message"), NO_POLICIES, ids=[name for name, *_ in NO_POLICIES])
def test_a_policy_that_is_another_model_is_refused_by_name(name, config, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicySpec.from_hf(written(tmp_path / "policy", config))


def test_an_assumption_is_logged_once(tmp_path, policy, caplog) -> None:
    folder = written(tmp_path / "draft", without(EAGLE, "rms_norm_eps"))
    for _ in range(2):
        draft_spec(settings(folder), policy)
    lines = [record.getMessage() for record in caplog.records]
    for text in (
        "layers 2, 6, 9 are tapped",
        "rope_theta is absent; 10000.0",
        "num_key_value_heads is absent; 4",
    ):
        assert len([line for line in lines if text in line]) == 1, text
