"""The registry of rollout engines: the only module that names one."""

from __future__ import annotations

from typing import Any

from torchspec.config.schema import Config
from torchspec.models.spec import PolicySpec
from torchspec.rollout.engine import Engine


def check_engine(config: Config, device_type: str, policy: PolicySpec) -> None:
    """Refuse a policy or an installation that the engine cannot work with, before anything is loaded.

    Raises:
        ConfigError: the engine's package is absent or untested, or it cannot compute this policy.
    """
    from torchspec.rollout.vllm import cpu_patches, setup

    setup.check_version(device_type)
    if device_type == "cpu":
        cpu_patches.check_head_dim(policy.head_dim)


def build_engine(config: Config, **arguments: Any) -> Engine:
    """Return the rollout engine of the config."""
    from torchspec.rollout.vllm.engine import VllmEngine

    return VllmEngine(config, **arguments)
