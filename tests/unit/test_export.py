"""Writing and reading checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchspec.attention import branch_attention
from torchspec.checkpoint.export import export_draft, export_policy
from torchspec.config.schema import Config, Parallel, TinyModel
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_policy
from torchspec.drafts.base import Verifier
from torchspec.drafts.build import load_draft
from torchspec.drafts.eagle3.checkpoint import LAYOUTS, config_json, renamed, required_names, spec_from_json
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.eagle3.spec import Eagle3Spec
from torchspec.drafts.vocab import build_d2t
from torchspec.errors import ConfigError
from torchspec.models import config_json as config_json_module
from torchspec.models import hf
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny

SHAPE = TinyModel(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=48)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh(Parallel(), device="cpu")
    yield mesh
    mesh.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "source"
    make_tiny(folder, SHAPE, max_len=64, seed=1)
    return folder


def test_policy_export_is_a_full_checkpoint(source: Path, tmp_path: Path, mesh: Mesh) -> None:
    policy = load_policy(source, PolicySpec.from_hf(source), mesh, Config())
    config = json.loads((source / "config.json").read_text())
    for dtype, name in ((None, "float32"), (torch.bfloat16, "bfloat16")):
        target = tmp_path / name
        export_policy(policy, target, source, mesh, dtype)
        assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()}
        assert json.loads((target / "config.json").read_text()) == config | {"dtype": name}
        stored = load_file(source / "model.safetensors")
        written = load_file(target / "model.safetensors")
        assert written.keys() == stored.keys()
        assert all(torch.equal(written[key], stored[key].to(dtype or torch.float32)) for key in stored)
    with pytest.raises(ConfigError, match="exists already; remove it or choose another folder"):
        export_policy(policy, target, source, mesh)


def test_large_checkpoints_come_in_shards(source: Path, tmp_path: Path) -> None:
    weights = load_file(source / "model.safetensors")
    hf.copy_assets(source, tmp_path)
    hf.write_tensors(tmp_path, weights.items(), shard_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / hf.INDEX).read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    assert not list(tmp_path.glob("part-*"))
    policy = Policy(PolicySpec.from_hf(tmp_path))
    hf.load_hf(policy, tmp_path)
    assert all(torch.equal(weights[name], weight) for name, weight in policy.hf_weights())
    files[1].unlink()
    with pytest.raises(ConfigError, match="unreadable safetensors"):
        hf.load_hf(policy, tmp_path)


def test_nothing_is_left_half_written(source: Path, tmp_path: Path, mesh: Mesh, monkeypatch) -> None:
    policy = load_policy(source, PolicySpec.from_hf(source), mesh, Config())

    def full_disk(*_args: object, **_kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(hf, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_policy(policy, tmp_path / "target", source, mesh)
    assert not list(tmp_path.iterdir())


def draft(size: int, seed: int) -> Eagle3:
    spec = Eagle3Spec(
        vocab_size=40,
        draft_vocab_size=size,
        dim=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        ffn_dim=24,
        norm_eps=1e-6,
        rope_theta=1e4,
        max_len=32,
        aux_layers=(0, 1, 2),
        fc_norm=True,
        norm_output=True,
    )
    torch.manual_seed(seed)
    counts = torch.randint(0, 100, (40,))
    return Eagle3(spec, None if size == 40 else build_d2t(counts, size))


VERIFIER = Verifier("some/policy", "Qwen3ForCausalLM", draft_tokens=5, embeddings=torch.ones(40, 16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [40, 24])
def test_draft_round_trip(layout: str, size: int, tmp_path: Path, mesh: Mesh) -> None:
    trained, other = draft(size, 1), draft(size, 2)
    want = {name: x.clone() for name, x in trained.hf_weights()}
    shard(trained, [], mesh, torch.float32)
    shard(other, [], mesh, torch.float32)
    export_draft(trained, tmp_path / "draft", mesh, layout, VERIFIER)
    load_draft(other, tmp_path / "draft")
    got = dict(other.hf_weights())
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert got.keys() == want.keys() == required_names(trained.spec)
    given = written.pop("embed_tokens.weight", None)  # that library would fill in uninitialised memory
    assert given is None if layout == "eagle3" else torch.equal(given, VERIFIER.embeddings)
    assert written.keys() == {renamed(name, layout) for name in want}
    assert ("layers.0.mlp.up_proj.weight" in written) == (layout == "speculators")
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert spec_from_json(json.loads((tmp_path / "draft/config.json").read_text())) == trained.spec


def test_an_export_has_just_the_tensors_that_loaders_need(tmp_path: Path, mesh: Mesh, monkeypatch) -> None:
    trained = draft(24, 1)
    weights = dict(trained.hf_weights())
    monkeypatch.setattr(trained, "hf_weights", lambda: [*weights.items(), ("bias", weights["norm.weight"])])
    with pytest.raises(RuntimeError, match="bias is not a tensor that loaders know"):
        export_draft(trained, tmp_path / "draft", mesh)
    monkeypatch.setattr(trained, "hf_weights", lambda: [(n, x) for n, x in weights.items() if n != "d2t"])
    with pytest.raises(RuntimeError, match="the loaders need d2t"):
        export_draft(trained, tmp_path / "draft", mesh)
    assert not list(tmp_path.iterdir())


def test_vllm_reads_the_speculators_config_as_ours() -> None:
    """Its own function, on what we write."""
    pytest.importorskip("vllm")
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    spec = draft(24, 1).spec
    config = config_json(spec, "speculators", VERIFIER)
    assert SpeculatorsConfig.extract_vllm_speculative_config(config) == {
        "method": "eagle3",
        "num_speculative_tokens": 5,
    }
    read = SpeculatorsConfig.extract_transformers_pre_trained_config(config)
    assert Eagle3Spec.from_hf_config({"target_hidden_size": spec.dim, **read}) == spec


def test_the_speculators_library_loads_it_and_computes_the_same(tmp_path: Path, mesh: Mesh) -> None:
    """Only where that library is installed; it does not fit into this project's environment."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    trained = draft(24, 1)
    shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    policy = Qwen3ForCausalLM(Qwen3Config(**shape, **heads))
    policy.save_pretrained(tmp_path / "policy")
    embedding = policy.model.embed_tokens.weight.detach()
    verifier = VERIFIER._replace(path=str(tmp_path / "policy"), embeddings=embedding)
    export_draft(trained, tmp_path / "draft", mesh, "speculators", verifier)
    # What the library does not find in the file is memory that was freed before: make that memory wrong.
    dirty = [torch.full_like(embedding, 1e6) for _ in range(100)]
    del dirty
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "draft")
    torch.manual_seed(5)
    tokens, aux = torch.randint(0, 40, (9,)), torch.randn(9, 48)
    assert torch.equal(theirs.embed_tokens.weight, embedding)
    embeds = embedding[tokens]
    positions = torch.arange(9)
    cu_seqlens = torch.tensor([0, 9], dtype=torch.int32)
    with torch.no_grad():
        hidden = trained._project(list(aux.chunk(3, dim=-1)))
        layer, x = trained.midlayer, trained.midlayer.inputs(embeds, hidden)
        (keys, values), queries = layer.self_attn.keys(x, positions), layer.self_attn.queries(x, positions)
        attended, _ = branch_attention(queries, keys, values, [], [], cu_seqlens)
        want = trained.lm_head(trained.norm(layer.outputs(hidden, attended)))
    seen = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    theirs.requires_grad_(False)  # flex attention on CPU knows no backward
    theirs(aux[None], tokens[None], torch.zeros(1, 9).long(), position_ids=positions[None], ttt_steps=1)
    torch.testing.assert_close(seen[0], want, rtol=1e-4, atol=1e-5)
    assert torch.equal(theirs.d2t, trained.d2t)
    assert torch.equal(theirs.t2d, trained.t2d)


def test_t2d_follows_d2t(tmp_path: Path) -> None:
    trained, other = draft(24, 1), draft(24, 2)
    weights = {name: x for name, x in trained.hf_weights() if name != "t2d"}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(trained.spec.hf_config()))
    assert not torch.equal(other.t2d, trained.t2d)
    load_draft(other, tmp_path)
    assert torch.equal(other.t2d, trained.t2d)


def test_drafts_that_do_not_fit(tmp_path: Path) -> None:
    target = draft(24, 1)
    good = {name: x.clone() for name, x in target.hf_weights()}
    (tmp_path / "config.json").write_text(json.dumps(target.spec.hf_config()))
    cases = {
        r"lack fc\.weight;": {k: v for k, v in good.items() if k != "fc.weight"},
        r"have unknown verifier_norm\.weight;": good | {"verifier_norm.weight": torch.zeros(16)},
        r"lm_head\.weight has shape \[40, 16\], but \[24, 16\]": good
        | {"lm_head.weight": torch.zeros(40, 16)},
    }
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_draft(target, tmp_path)
    for message, weights in cases.items():
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            load_draft(target, tmp_path)
    assert all(torch.equal(good[name], x) for name, x in target.hf_weights())


MAP = [3, 5, 9, 12, *range(20, 40)]
T2D = torch.zeros(40, dtype=torch.bool).index_fill(0, torch.tensor(MAP), True)
OFFSETS = torch.tensor(MAP) - torch.arange(24)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({"d2t": torch.tensor(MAP)}, "d2t leads to token 62, but the model has tokens 0 to 39"),
        ({"d2t": OFFSETS - 9}, "d2t leads to token -6, but"),
        ({"d2t": -torch.arange(24)}, "the same token from two draft ids"),
        ({"d2t": OFFSETS.float()}, r"d2t is torch.float32 \[24\]; a list of integers"),
        ({"d2t": OFFSETS, "t2d": ~T2D}, "does not mark just the tokens that d2t leads to"),
        ({"d2t": OFFSETS, "t2d": T2D[:24]}, r"t2d \[24\] does not mark"),
        ({"d2t": torch.zeros(40, dtype=torch.int64)}, "draft_vocab_size is 24 of 40"),
        ({}, "the weights lack d2t"),
    ],
)
def test_maps_are_checked_as_indices(maps, message, tmp_path: Path) -> None:
    target = draft(24, 1)
    weights = {name: x for name, x in target.hf_weights() if name not in ("d2t", "t2d")}
    (tmp_path / "config.json").write_text(json.dumps(target.spec.hf_config()))
    save_file(weights | {"d2t": OFFSETS, "t2d": T2D}, tmp_path / "model.safetensors")
    load_draft(target, tmp_path)
    assert target.d2t.tolist() == OFFSETS.tolist()
    assert torch.equal(target.t2d, T2D)
    save_file(weights | maps, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_draft(target, tmp_path)


def test_a_map_of_a_whole_vocabulary(tmp_path: Path) -> None:
    """Some trainers write one of zeros all the same; another one contradicts config.json."""
    target = draft(40, 1)
    weights, zeros = dict(target.hf_weights()), torch.zeros(40, dtype=torch.int64)
    (tmp_path / "config.json").write_text(json.dumps(target.spec.hf_config()))
    save_file(weights | {"d2t": zeros, "t2d": zeros == 0}, tmp_path / "model.safetensors")
    load_draft(target, tmp_path)
    for wrong in (OFFSETS, torch.arange(40)):
        save_file(weights | {"d2t": wrong}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match="draft_vocab_size is 40 of 40; set draft_vocab_size"):
            load_draft(target, tmp_path)


def test_norm_output_is_explained_once_on_import_and_on_export(caplog, monkeypatch) -> None:
    monkeypatch.setattr(config_json_module, "_logged", set())
    spec = draft(24, 1).spec
    for _ in range(2):
        spec_from_json(config_json(spec, "eagle3", VERIFIER))
    lines = [record.getMessage() for record in caplog.records if "norm_output" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("draft export: norm_output = true means")
    assert all("SpecForge has another meaning" in line for line in lines)
    config_json(spec, "eagle3")  # the run's own engine
