"""What a run would need, before there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchspec.attention import get_transport
from torchspec.commands.dry_run import MB, estimate, policy_spec, report
from torchspec.commands.meta_memory import LiveBytes
from torchspec.config.load import load
from torchspec.distributed.pipeline.schedule import stage_ranks
from torchspec.distributed.pipeline.schedule_memory import moments, schedule_order
from torchspec.errors import ConfigError
from train import train

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo_cpu.toml"


def test_any_world_on_one_cpu(tmp_path) -> None:
    text = report(load(DEMO, ["--parallel.cp", "2"]), "64")
    assert "mesh: 64 ranks = pp 1 x dp_shard 32 x cp 2" in text
    assert "run.name = 'demo'" in text
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if line[:1].isalpha()}
    one = {x.split()[0]: x.split()[1] for x in report(load(DEMO), "").splitlines() if x[:1].isalpha()}
    assert float(rows["parameters"]) < float(one["parameters"]) / 16
    assert float(rows["optimizer"]) == pytest.approx(2 * float(rows["parameters"]), abs=0.15)
    assert float(rows["activations"]) == pytest.approx(float(one["activations"]) / 2, rel=0.05)
    assert rows["kv_cache"] == one["kv_cache"] == "256.0"


@pytest.mark.parametrize("name", ["qwen3_8b_8gpu", "qwen3_8b_32k_8gpu", "qwen3_8b_8gpu_pp"])
def test_an_8b_policy_needs_no_weights(tmp_path, capsys, name) -> None:
    shape = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
    other = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **heads, **other}))
    train([str(ROOT / "configs" / f"{name}.toml"), "--model.source", str(tmp_path), "--dry-run.world", "8"])
    rows = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()
    }
    places = 2 if name.endswith("pp") else 1
    draft = 4096 * (3 * 4096 + 2 * 4096 + 32 * 128 + 3 * 12288 + 32000) + 2 * 2 * 4096 * 8 * 128 + 4096**2
    parameters = sum(map(float, rows["parameters"])) * MB / 4 * 8 / places  # every stage has a draft
    assert parameters == pytest.approx(8.19e9 + places * draft, rel=0.02)
    assert [float(x) for x in rows["optimizer"]] == pytest.approx(
        [2 * float(x) for x in rows["parameters"]], rel=1e-3
    )
    assert all(30 < float(x) * MB / 2**30 < 65 for x in rows["training_peak"])
    if places == 2:  # 19 layers and 17; 1F1B holds two microbatches below and one above
        below, above = map(float, rows["activations"])
        assert below / above == pytest.approx(2 * 19 / 17, rel=0.1)


def test_a_reference_is_a_second_policy_and_no_more() -> None:
    demo, kl = (estimate(c, policy_spec(c), 4) for c in (load(DEMO), load(DEMO, ["--rl.kl_coef", "0.1"])))
    assert demo.reference == 0 < kl.reference < kl.parameters
    assert kl.training_peak - demo.training_peak == kl.reference


def test_a_frozen_draft_has_weights_alone() -> None:
    config = load(DEMO, ["--draft.train_every", "0"])
    frozen, learning = (estimate(c, policy_spec(c), 1) for c in (config, load(DEMO)))
    assert frozen.parameters == learning.parameters
    assert frozen.optimizer < learning.optimizer
    assert frozen.taps == frozen.passes == frozen.trunk == 0


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("placement", ["last", "spread"])
def test_what_a_rank_holds_in_flight(schedule, placement) -> None:
    ranks, count = 4, 12
    stages = ranks if schedule in ("1F1B", "GPipe") else 2 * ranks
    where = stage_ranks(schedule, ranks, stages)
    order = schedule_order(schedule, ranks, stages, count)
    sources = {0: 1, stages // 2: 2, stages - 1: 2}
    sinks = [where[-1] if placement == "last" else m % ranks for m in range(count)]
    for rank in range(ranks):
        seen = list(moments(order, rank, where, sources, sinks))
        assert sum(moment.doing == "draft" for moment in seen) == sinks.count(rank)
        assert sum(moment.doing != "draft" for moment in seen) == len(order[rank])
        most = max(sum(moment.in_flight.values()) for moment in seen)
        # One more than the forwards that lead, as then every backward comes after a forward. Interleaved1F1B:
        # a round of `ranks` on the lower stage, and two for each rank further on. ZBV: on rank r 2 (ranks - r) - 1
        # on the stage of the way down, and r on both before the first on the way back has its backward.
        known = {
            "GPipe": count,
            "1F1B": ranks - rank,
            "Interleaved1F1B": ranks + 2 * (ranks - 1 - rank) + 1,
            "ZBVZeroBubble": 2 * ranks,
        }
        assert most == known[schedule]
        # What the draft is trained on is there, and only in the end nothing else is.
        assert all(
            moment.taps >= (5 if rank != where[-1] else 2)
            for moment in seen
            if moment.doing == "draft" and moment.last
        )
        assert all(not sum(moment.in_flight.values()) for moment in seen if moment.last)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_one_rank_has_no_schedule(schedule) -> None:
    plain, named = (
        estimate(c, policy_spec(c), 2) for c in (load(DEMO), load(DEMO, ["--parallel.schedule", schedule]))
    )
    assert named == plain


@pytest.mark.parametrize("transport", ["ring", "gather", "query_ring"])
def test_what_a_transport_holds_is_counted(monkeypatch, transport) -> None:
    config = load(DEMO, ["--parallel.cp", "2", "--parallel.attention", transport])
    kind = type(get_transport(transport))
    real = kind.running
    monkeypatch.setattr(kind, "running", lambda *args: dict.fromkeys(real(*args), 2**40))
    assert estimate(config, policy_spec(config), 2).backward > 2**39  # and all of those ops were run


def test_views_and_what_was_there_before_are_not_counted() -> None:
    before = torch.empty(100, 10, device="meta")
    with LiveBytes({"aten::mm": 4000}) as live:
        view = before.t()[:5]
        assert live.now == 0
        made = view @ before
        assert (live.now, live.peak) == (4 * 50, 4 * 50 + 4000)
        del made
        assert live.now == 0


def test_an_op_that_was_never_run_is_an_error() -> None:
    with (
        pytest.raises(LookupError, match=r"\['aten::gone'\] were not run"),
        LiveBytes({"aten::gone": 1, "aten::empty": 1}),
    ):
        torch.empty(1, device="meta")


@pytest.mark.parametrize(("world", "message"), [("0", "1 or more"), ("x", "a number of ranks")])
def test_a_world_must_be_a_number(world, message) -> None:
    with pytest.raises(ConfigError, match=message):
        report(load(DEMO), world)
