"""The policy against transformers, and against itself computed in other ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from torchspec.config.schema import Config, Parallel
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_policy
from torchspec.errors import ConfigError
from torchspec.models import hf
from torchspec.models.policy import Policy, target_logprobs
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, SamplingLaw

VOCAB, LAYERS, LENGTHS = 104, 3, [9, 30, 1, 17]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CHECKPOINTS = ["qwen3", "qwen3-tied", "llama3", "llama3-tied"]


def reference_model(kind: str) -> transformers.PreTrainedModel:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": kind.endswith("tied"),
        "initializer_range": 0.1,
        "rms_norm_eps": 1e-3,  # large, so that a wrong one shows
    }
    torch.manual_seed(0)
    if kind.startswith("qwen3"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=32))
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, rope_parameters=dict(LLAMA3_ROPE))
        )
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = reference_model(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    reference_model("qwen3").save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **kwargs: bool) -> Policy:
    policy = Policy(PolicySpec.from_hf(folder), **kwargs)
    hf.load_hf(policy, folder)
    return policy.to(dtype)


def pack(lengths: list[int], seed: int = 0) -> Batch:
    """Random documents; in each, the last of the predicted tokens and a random third are masked."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(0, VOCAB, (total,), generator=g)
    docs = tokens.split(lengths)
    mask = torch.rand(total, generator=g) > 1 / 3
    ends = torch.tensor(lengths).cumsum(0)
    mask[ends - 1] = False
    return Batch(
        tokens=tokens,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        targets=torch.cat([torch.cat([doc[1:], doc.new_zeros(1)]) for doc in docs]),
        target_mask=mask,
        rollout_logprobs=torch.zeros(total),
        advantages=torch.zeros(total),
        chain=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
    )


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    grads = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return grads


def test_equals_transformers(checkpoint) -> None:
    model, folder = checkpoint
    batch, temperature = pack(LENGTHS), 0.7
    aux_layers = (0, 2, LAYERS)
    out = load(folder)(
        batch, law=SamplingLaw(temperature=temperature), logprob_rows=16, aux_layers=aux_layers
    )

    # The last layer's output before the norm is not among transformers' hidden states.
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _m, _i, o: last.append(o[0]))
    with torch.no_grad():
        refs = [model(doc[None], output_hidden_states=True) for doc in batch.tokens.split(LENGTHS)]
    hook.remove()
    hidden = [torch.cat([r.hidden_states[i][0] for r in refs]) for i in range(LAYERS + 1)]
    logprobs = (torch.cat([r.logits[0] for r in refs]) / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, batch.targets[:, None])[:, 0]

    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.logprobs, chosen * batch.target_mask, **close)
    torch.testing.assert_close(out.entropy, entropy * batch.target_mask, **close)
    torch.testing.assert_close(out.taps.embeds, hidden[0], **close)
    torch.testing.assert_close(out.taps.aux[0], hidden[0], **close)
    torch.testing.assert_close(out.taps.aux[1], hidden[2], **close)
    torch.testing.assert_close(out.taps.aux[2], torch.cat(last), **close)
    torch.testing.assert_close(out.taps.final, hidden[LAYERS], **close)
    assert not any(tap.requires_grad for tap in (out.taps.embeds, *out.taps.aux, out.taps.final))


def test_round_trip_is_bitwise(checkpoint) -> None:
    model, folder = checkpoint
    stored = load_file(folder / "model.safetensors")
    written = dict(load(folder).hf_weights())
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    torch.testing.assert_close(load(folder).head_weight(), model.lm_head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_packed_documents_equal_separate_runs(kind: str, tmp_path: Path) -> None:
    reference_model(kind).save_pretrained(tmp_path)
    policy, batch = load(tmp_path, torch.float64), pack(LENGTHS)
    together = policy(batch, law=SamplingLaw(temperature=1.0), logprob_rows=64, aux_layers=(1,))
    together.logprobs.sum().backward()
    packed_grads = gradients(policy)
    rows, logprobs, finals = 0, [], []
    for length in LENGTHS:
        part = slice(rows, rows + length)
        rows += length
        doc = Batch(
            **{name: getattr(batch, name)[part] for name in (*Batch.DEVICE_ROWS, "chain")},
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        )
        alone = policy(doc, law=SamplingLaw(temperature=1.0), logprob_rows=64, aux_layers=(1,))
        alone.logprobs.sum().backward()
        logprobs.append(alone.logprobs)
        finals.append(alone.taps.final)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(together.logprobs, torch.cat(logprobs), **close)
    torch.testing.assert_close(together.taps.final, torch.cat(finals), **close)
    torch.testing.assert_close(packed_grads, gradients(policy), **close)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunked_head_equals_dense(rows: int) -> None:
    torch.manual_seed(0)
    batch, temperature = pack(LENGTHS), 0.6
    final = torch.randn(sum(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(sum(LENGTHS), dtype=torch.float64)

    dense = (final @ head.T / temperature).log_softmax(-1)
    want = dense.gather(-1, batch.targets[:, None])[:, 0] * batch.target_mask
    want_entropy = -(dense.exp() * dense).sum(-1) * batch.target_mask
    want_grads = torch.autograd.grad((want * weights).sum(), (final, head))

    got, entropy = target_logprobs(final, head, batch, SamplingLaw(temperature=temperature), rows)
    grads = torch.autograd.grad((got * weights).sum(), (final, head))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, want_grads, rtol=0, atol=1e-12)
    assert not entropy.requires_grad


class LargestLogits(TorchDispatchMode):
    """Records the most rows any tensor with V columns had."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[-1] == VOCAB:
                self.rows = max(self.rows, x.numel() // VOCAB)
        return out


def test_full_logits_never_exist() -> None:
    batch = pack([300])
    final = torch.randn(300, 16, requires_grad=True)
    head = torch.randn(VOCAB, 16, requires_grad=True)
    with LargestLogits() as largest:
        target_logprobs(final, head, batch, SamplingLaw(), 32)[0].sum().backward()
    # 32 rows of logits; the transposed head [16, V] is smaller.
    assert largest.rows == 32


def test_activation_checkpointing_changes_nothing(folder: Path) -> None:
    batch = pack(LENGTHS)
    results = []
    for active in (False, True):
        policy = load(folder, activation_checkpointing=active)
        out = policy(batch, law=SamplingLaw(temperature=1.0), logprob_rows=16)
        out.logprobs.sum().backward()
        results.append((out.logprobs, gradients(policy)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama3"])
def test_masked_pack_reaches_every_parameter_with_zeros(kind: str, tmp_path: Path) -> None:
    reference_model(kind).save_pretrained(tmp_path)
    policy, batch = load(tmp_path), pack(LENGTHS)
    batch.target_mask = torch.zeros_like(batch.target_mask)
    out = policy(batch, law=SamplingLaw(temperature=1.0), logprob_rows=16)
    out.logprobs.sum().backward()
    assert not out.logprobs.any()
    assert not out.entropy.any()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_bf16_keeps_logprobs_fp32(folder: Path) -> None:
    batch = pack(LENGTHS)
    exact = load(folder)(batch, law=SamplingLaw(temperature=1.0), logprob_rows=16)
    out = load(folder, torch.bfloat16)(
        batch, law=SamplingLaw(temperature=1.0), logprob_rows=16, aux_layers=(1,)
    )
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    assert out.taps.final.dtype == torch.bfloat16
    assert (out.logprobs - exact.logprobs).abs().mean() < 0.1


def test_world_of_one_is_sharded_and_equal(folder: Path) -> None:
    spec, batch = PolicySpec.from_hf(folder), pack(LENGTHS)
    plain = load(folder)
    mesh = Mesh(Parallel(), device="cpu")
    try:
        sharded = load_policy(folder, spec, mesh, Config())
        assert (mesh.rank, mesh.world_size, mesh.dp_rank, mesh.is_main) == (0, 1, 0, True)
        assert (
            float(mesh.sum_over_world(torch.tensor(3.0)))
            == float(mesh.max_over_world(torch.tensor(3.0)))
            == 3.0
        )
        for policy in (plain, sharded):
            policy(batch, law=SamplingLaw(temperature=1.0), logprob_rows=16).logprobs.sum().backward()
        full = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
        torch.testing.assert_close(full, gradients(plain), rtol=0, atol=0)
    finally:
        mesh.close()


def test_wrong_world_size() -> None:
    with pytest.raises(ConfigError, match=r"dp_shard = 2 need 2 ranks, but there are 1; start torchrun"):
        Mesh(Parallel(dp_shard=2), device="cpu")
    with pytest.raises(
        ConfigError, match=r"parallel.cp = 4 and .* need a multiple of 4 ranks, but there are 1"
    ):
        Mesh(Parallel(cp=4), device="cpu")


def test_init_is_seeded_and_leaves_the_global_generator_alone() -> None:
    spec = PolicySpec(
        arch="llama3",
        vocab_size=16,
        dim=8,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=4,
        ffn_dim=8,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tied=True,
        max_len=8,
    )
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    policies = [Policy(spec) for _ in range(3)]
    torch.random.set_rng_state(before)
    for policy, seed in zip(policies, (1, 1, 2)):
        policy.init_weights(seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = (torch.cat([p.flatten() for p in policy.parameters()]) for policy in policies)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def edited(folder: Path, target: Path, **changes: object) -> Path:
    """`folder`'s config with some keys replaced, or removed where None, and its weights."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return target


def test_spec_reads_old_and_new_rope_keys(folder: Path, tmp_path: Path) -> None:
    new = PolicySpec.from_hf(folder)
    old = PolicySpec.from_hf(edited(folder, tmp_path, rope_parameters=None, rope_theta=10000.0))
    assert new == old
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    spec = PolicySpec.from_hf(
        edited(folder, tmp_path, **llama, rope_parameters=None, rope_theta=5e4, rope_scaling=scaling)
    )
    assert spec.arch == "llama3"
    assert spec.rope_theta == 5e4
    assert spec.rope_scaling == {k: v for k, v in scaling.items() if k != "rope_type"}
    assert PolicySpec.from_hf(folder, max_len=64).max_len == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "Qwen3MoeForCausalLM is not supported; supported: Qwen3",
        ),
        ({"architectures": None}, "architecture none"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE scaling 'yarn'"),
        ({"rope_parameters": LLAMA3_ROPE}, "RoPE scaling 'llama3'"),  # on Qwen3
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"max_position_embeddings": 16}, r"max_len = 32 is more than the 16"),
    ],
)
def test_unsupported_configs(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicySpec.from_hf(edited(folder, tmp_path, **changes), max_len=32)


def test_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        PolicySpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        PolicySpec.from_hf(tmp_path)


def test_bad_weights(folder: Path, tmp_path: Path) -> None:
    spec = PolicySpec.from_hf(folder)
    good = load_file(folder / "model.safetensors")
    norm = "model.norm.weight"
    cases = {
        r"lack model\.norm\.weight;": {k: v for k, v in good.items() if k != norm},
        r"have unknown model\.extra;": good | {"model.extra": torch.zeros(1)},
        r"model\.norm\.weight has shape \[63\], but \[64\]": good | {norm: torch.ones(63)},
    }
    policy = Policy(spec)
    policy.init_weights(0)
    before = {name: w.clone() for name, w in policy.hf_weights()}
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        hf.load_hf(policy, tmp_path)
    for message, weights in cases.items():
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            hf.load_hf(policy, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="unreadable safetensors"):
        hf.load_hf(policy, tmp_path)
    assert all(torch.equal(before[name], w) for name, w in policy.hf_weights())


def test_hub_ids_need_the_hub(monkeypatch, tmp_path: Path) -> None:
    assert hf.resolve_source(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model.source = 'no/such' is no local folder.*;.*") as error:
        hf.resolve_source("no/such")
    assert "\n" not in str(error.value)
