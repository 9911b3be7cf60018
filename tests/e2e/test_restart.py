"""An engine that dies while it generates: what was finished is kept, the rest is made by another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import engine_config, requests
from restart_run import LIMIT_S, die_at, runner_of
from test_drafters import config_of
from test_durable import assert_same_tensors, measured
from test_refit import stored
from test_vllm_engine import oracle_logprobs

from torchspec.errors import EngineDied, GuardStop
from torchspec.records import SpecStats
from torchspec.rollout.engine import Sampling
from torchspec.rollout.vllm.engine import VllmEngine
from torchspec.training.refit import refit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.e2e

SEEDED = Sampling(max_new_tokens=40, seed=11)
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)


def die_in_the_middle(engine: VllmEngine, batch: Any, sampling: Sampling, step: int) -> list[Any]:
    """Let `generate` die; returns the answers that were complete."""
    die_at(engine, step)
    with pytest.raises(
        EngineDied, match=r"RuntimeError: the device fell off the bus \(complete were \d+ of 15"
    ):
        engine.generate(batch, sampling)
    kept = [sample.rollout for sample in engine._samples if sample.rollout]
    assert 2 < len(kept) < 13
    return kept


def count_asked(engine: VllmEngine) -> list[int]:
    """Requests that vLLM gets from now on, by call."""
    asked, enqueue = [], engine._llm.enqueue

    def counting(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(prompts))
        return enqueue(prompts, *args, **kwargs)

    engine._llm.enqueue = counting
    return asked


def test_finished_answers_are_kept_and_the_others_are_the_undisturbed_ones(folders) -> None:
    """Bitwise, with the weights of a refit that the engine was not built with."""
    policy, batch = stored(folders["policy2"]), requests(5, seed=0, samples=3)
    engine = VllmEngine(engine_config(max_num_seqs=4), folders["policy"], None, seed=0, device_type="cpu")
    refit(engine, policy, None, policy_version=3, draft_version=0)
    undisturbed = engine.generate(batch, SEEDED)
    before = engine.counters.samples, engine.counters.tokens

    model, cache = weakref.ref(runner_of(engine).model), weakref.ref(runner_of(engine).kv_caches[0])
    kept = die_in_the_middle(engine, batch, SEEDED, step=60)
    state = torch.get_rng_state()
    engine.restart()
    assert torch.equal(torch.get_rng_state(), state)
    assert model() is None  # its memory is free
    assert cache() is None
    assert (engine.policy_version, engine.draft_version) == (0, 0)  # what it holds, until it is told better
    refit(engine, policy, None, policy_version=3, draft_version=0)
    asked = count_asked(engine)
    rollouts = engine.resume()
    assert asked == [15 - len(kept)]
    assert rollouts == undisturbed
    assert all(any(rollout is one for one in rollouts) for rollout in kept)
    assert {r.policy_version for r in rollouts} == {3}
    assert engine.counters.samples == before[0] + 15  # each was made, and counted, once
    assert engine.counters.tokens == 2 * before[1]
    assert engine.generate(batch, SEEDED) == undisturbed  # as good as new

    # What is ours, or the user's, is no death.
    for error in (GuardStop("it is ours"), KeyboardInterrupt()):
        die_at(engine, 1, error)
        with pytest.raises(type(error)):
            engine.generate(batch, SEEDED)
    engine.close()


@pytest.fixture(scope="module")
def oracle(folders):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folders["policy2"], dtype=torch.float32).eval()


def test_the_drafters_keep_what_they_learned(folders, oracle) -> None:
    policy, draft = stored(folders["policy2"]), stored(folders["draft"])
    engine = VllmEngine(
        config_of("hybrid", "unlimited", max_num_seqs=4),
        folders["policy"], folders["draft"], seed=0, device_type="cpu",
    )  # fmt: skip

    def refit_all() -> None:
        refit(engine, policy, draft, policy_version=3, draft_version=2)

    refit_all()
    batch = requests(5, seed=0, samples=3)
    undisturbed = engine.generate(batch, GREEDY)
    engine.learn(1, undisturbed)
    speculator = engine.speculator
    speculator.drain_stats()
    history = speculator.suffix.state_dict()["generations"]
    observed = speculator.budget.state.survival.counts.sum()
    assert len(history) == 5

    kept = die_in_the_middle(engine, batch, GREEDY, step=12)
    engine.restart()
    assert engine.speculator is speculator
    assert not speculator._requests
    learned = speculator.budget.state.survival.counts.sum() - observed  # of lengths; old ones fade
    assert learned == pytest.approx(len(kept), abs=0.5)
    for now, then in zip(speculator.suffix.state_dict()["generations"], history, strict=True):
        assert now["problem"] == then["problem"]
        assert (now["nodes"] == then["nodes"]).all()
    speculator.drain_stats()
    refit_all()
    rollouts = engine.resume()
    assert [(r.problem_id, r.sample, r.tokens) for r in rollouts] == [
        (r.problem_id, r.sample, r.tokens) for r in undisturbed
    ]
    assert {(r.policy_version, r.draft_version) for r in rollouts} == {(3, 2)}
    made = [r for r in rollouts if not any(r is one for one in kept)]
    assert SpecStats.total((r.spec for r in made), 8).tau > 3  # everything was said before
    assert all(sum(stats.drafted) for stats in speculator.drain_stats().drafters.values())
    # At temperature 1 a draft that samples does not repeat; its log-probabilities are the policy's all the same.
    sampling = Sampling(max_new_tokens=40)
    kept = die_in_the_middle(engine, batch, sampling, step=60)
    begun = {s.id: list(s.tokens) for s in engine._samples if s.rollout is None and s.tokens}
    assert 1 < len(begun) <= 4
    engine.restart()
    refit_all()
    rollouts = engine.resume()
    # What was begun goes on: made anew, it could still become a short answer, and the kept ones are short already.
    for sample in engine._samples:
        if sample.id in begun:
            assert sample.rollout.tokens[: len(begun[sample.id])] == begun[sample.id]
            assert len(begun[sample.id]) < len(sample.rollout.tokens) <= 40
    assert [(r.problem_id, r.sample) for r in rollouts] == [
        (q.problem_id, s) for q in batch for s in range(3)
    ]
    for rollout in rollouts:
        expected = oracle_logprobs(oracle, rollout, 1.0)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-4)
    engine.close()


def run(folder: Path, scenarios: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Two ranks, three steps, by name of the run; returns statuses and times, and what was said."""
    options = {
        "run.dir": folder, "run.steps": 3, "eval.every": 0, "checkpoint.every": 0, "eval.frozen_draft": "false",
        "rollout.max_num_seqs": 2,
    }  # fmt: skip
    todo = []
    for name, scenario in scenarios.items():
        keys = options | {"run.name": name} | scenario.pop("keys")
        overrides = [f"--{key}={value}" for key, value in keys.items()]
        todo.append({"log": str(folder / f"{name}.jsonl"), "overrides": overrides, **scenario})
    done = subprocess.run(
        [sys.executable, str(HERE / "restart_run.py"), json.dumps(todo)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{HERE}"},
        timeout=LIMIT_S * len(todo) + 60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(scenarios, lines, strict=True)), done.stderr


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


OFF = {"draft.enabled": "false", "rollout.drafter": "model"}


@pytest.mark.dist
def test_one_rank_of_two_loses_its_engine(tmp_path) -> None:
    """With shards of the policy on both: rollouts, metrics and weights are bitwise those of a calm run."""
    found, said = run(tmp_path, {"calm": dict(dies=[], keys=OFF), "dies": dict(dies=[2], keys=OFF)})
    assert [one["statuses"] for one in found.values()] == [[0, 0], [0, 0]], said[-3000:]
    rollouts = rows(tmp_path / "dies.jsonl")
    assert [r["policy_version"] for r in rollouts] == [0] * 12 + [1] * 12 + [2] * 12
    assert rollouts == rows(tmp_path / "calm.jsonl")
    assert_same_tensors(tmp_path / "calm" / "policy", tmp_path / "dies" / "policy")
    calm, dies = measured(tmp_path / "calm"), measured(tmp_path / "dies")
    assert [row.pop("rollout/engine_restarts") for row in dies] == [0, 1, 0]
    assert [row.pop("rollout/engine_restarts") for row in calm] == [0, 0, 0]
    assert dies == calm
    assert len({row["policy/grad_norm"] for row in calm}) == 3
    assert said.count("step 2: rank 1's rollout engine died, and is built again") == 1
    assert "RuntimeError: the device fell off the bus (complete were 2 of 6 answers)" in said


@pytest.mark.dist
def test_the_draft_comes_back_too(tmp_path) -> None:
    """Drafts that sample: no two runs are alike, but the rollouts are the trained policy's."""
    budget = {"budget.rule": "unlimited"}
    found, said = run(tmp_path, {"both": dict(dies=[3], at=10, keys=budget)})
    assert found["both"]["statuses"] == [0, 0], said[-3000:]
    rollouts = rows(tmp_path / "both.jsonl")
    assert [(r["policy_version"], r["draft_version"]) for r in rollouts] == [
        versions for versions in ((0, 0), (1, 0), (2, 2)) for _ in range(12)
    ]
    metrics = measured(tmp_path / "both")
    assert [row["rollout/engine_restarts"] for row in metrics] == [0, 0, 1]
    assert all(abs(row["policy/kl_train_rollout"]) < 1e-5 for row in metrics)
    assert metrics[2]["speculation/suffix_drafted"] > 0


@pytest.mark.dist
def test_a_second_death_ends_the_job_everywhere(tmp_path) -> None:
    """At once with one line each; and where a rank cannot even build another engine, the others notice."""
    found, said = run(
        tmp_path, {"twice": dict(dies=[1, 1], keys=OFF), "gone": dict(dies=[1], keys=OFF, unbuilt=True)}
    )
    assert found["twice"]["statuses"] == [3, 3], said[-3000:]
    assert said.count("stopped: step 1: this rank's rollout engine died again") == 1
    assert said.count("stopped: step 1: another rank's rollout engine died again") == 1
    assert found["gone"]["statuses"] == [1, 1]
    assert "there is no device any more" in said
