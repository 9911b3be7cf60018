"""An engine from outside the package, which knows the registry alone, answers a fleet's calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchspec.config.schema import Config
from torchspec.errors import ConfigError
from torchspec.records import Rollout
from torchspec.rollout.engine import Counters, Request, Sampling
from torchspec.rollout.fleet import Fleet
from torchspec.rollout.registry import ENGINES, EngineKind, build_engine, check_engine, register
from torchspec.speculation.lengths import LengthStats


class Echo:
    """Answers every prompt with itself."""

    longest_draft = policy_version = draft_version = 0

    def __init__(self, **settings: Any) -> None:
        self.settings, self.counters = settings, Counters()

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Rollout]:
        return [self._answer(r, sample) for r in requests for sample in range(r.samples)]

    def _answer(self, request: Request, sample: int) -> Rollout:
        tokens = list(request.prompt_tokens)
        return Rollout(
            problem_id=request.problem_id,
            sample=sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tokens,
            logprobs=[0.0] * len(tokens),
            finish="stop",
            policy_version=0,
            draft_version=0,
        )

    def learn(self, iteration: int, rollouts: Any) -> None: ...

    def drain_stats(self) -> None: ...

    def frozen_stats(self) -> Any:
        return nullcontext()


def refuse_cuda(device_type: str, policy_spec: Any) -> None:
    if device_type == "cuda":
        raise ConfigError("echo runs on the CPU")


@pytest.fixture
def config() -> Iterator[Config]:
    register("echo", EngineKind(Echo, refuse_cuda))
    config = Config()
    config.rollout.engine = "echo"
    yield config
    del ENGINES["echo"]


def test_an_engine_from_outside_answers_a_fleet(config: Config) -> None:
    lengths = LengthStats(default=8)
    engine = build_engine(
        config, policy_folder=Path("p"), draft_folder=None, seed=3, device_type="cpu", lengths=lengths
    )
    assert engine.settings["seed"] == 3
    mesh = SimpleNamespace(rank=0, world_size=1, max_over_world=torch.clone, gather_world=list)
    fleet = Fleet(mesh, engine, lengths, 1.0)
    requests = [Request(problem_id=p, prompt_tokens=[n, n], samples=2) for n, p in enumerate("ab")]
    mine = fleet.generate(requests, Sampling(max_new_tokens=4))
    assert not fleet.any_died(1)
    assert [r.tokens for r in fleet.exchange(mine)] == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_engines_and_rules_are_checked_by_name(config: Config) -> None:
    check_engine(config, "cpu", None)
    with pytest.raises(ConfigError, match="echo runs on the CPU"):
        check_engine(config, "cuda", None)
    config.budget.rule = "prize"
    with pytest.raises(ConfigError, match=r"budget\.rule = 'prize' is not allowed; did you mean 'price'\?"):
        check_engine(config, "cpu", None)
    config.rollout.engine = "ecko"
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'ecko' is not allowed; did you mean 'echo'\?"):
        check_engine(config, "cpu", None)


def test_the_registry_imports_no_vllm() -> None:
    code = "import sys, torchspec.rollout.registry; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
