"""Rollout engines by the name that rollout.engine gives."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchspec.config.schema import Config
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec
from torchspec.rollout.engine import Engine
from torchspec.rollout.vllm.engine import VllmEngine
from torchspec.rollout.vllm.setup import check_vllm
from torchspec.speculation.budgets.registry import rule_class
from torchspec.speculation.lengths import LengthStats


@dataclass(frozen=True, slots=True)
class EngineKind:
    build: Callable[..., Engine]
    """Called as `build_engine` is, by keywords."""
    check: Callable[[str, PolicySpec], None]
    """`check(device_type, policy_spec)` raises ConfigError where the engine cannot run."""


ENGINES: dict[str, EngineKind] = {
    "vllm": EngineKind(VllmEngine, check_vllm),
}


def register(name: str, kind: EngineKind) -> None:
    """Add an engine from outside this package; rollout.engine = name selects it.

    Raises:
        ValueError: the name is taken.
    """
    if name in ENGINES:
        raise ValueError(f"an engine {name!r} is already registered")
    ENGINES[name] = kind


def check_engine(config: Config, device_type: str, policy_spec: PolicySpec) -> None:
    """Raise ConfigError, before weights load, where the engine or its budget rule cannot be used."""
    _kind(config).check(device_type, policy_spec)
    rule_class(config.budget.rule)


def build_engine(
    config: Config,
    *,
    policy_folder: Path,
    draft_folder: Path | None,
    seed: int,
    device_type: str,
    lengths: LengthStats | None = None,
    window: int = 16,
) -> Engine:
    """Build this rank's engine.

    Args:
        policy_folder: HF folder of the policy.
        draft_folder: HF folder of the draft; None: no draft model.
        seed: of everything that this engine samples.
        device_type: "cpu" or "cuda".
        lengths: what is known of responses' lengths; the owner lets it observe.
        window: iterations that the suffix drafter remembers, where suffix.window is 0.

    Raises:
        ConfigError: the engine cannot be built as the config says.
    """
    return _kind(config).build(
        config=config,
        policy_folder=policy_folder,
        draft_folder=draft_folder,
        seed=seed,
        device_type=device_type,
        lengths=lengths,
        window=window,
    )


def _kind(config: Config) -> EngineKind:
    name = config.rollout.engine
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"rollout.engine = {name!r} is not allowed; {hint}one of: {', '.join(ENGINES)}")
    return ENGINES[name]
