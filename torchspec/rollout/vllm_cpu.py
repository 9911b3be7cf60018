"""Defects of vLLM on CPU that we meet, each mended only where a probe shows it.

Imports vLLM inside functions only. `tests/e2e/test_vllm_cpu_mends.py` runs every probe against the pristine
library: when it fails because a probe finds nothing, upstream has mended it and the entry here can go.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchspec.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mend:
    name: str
    upstream: str
    """Where it is reported."""
    seen_in: str
    """vLLM versions whose source has the defect."""
    effect: str
    shows: Callable[[], bool]
    """The probe: True where the defect is there."""
    repair: Callable[[], None]


HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPU has kernels for."""


def check_head_dim(head_dim: int) -> None:
    """Refuse a policy whose attention vLLM cannot compute on CPU; vLLM itself says so deep in its first step."""
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"the policy's head_dim = {head_dim} (model.tiny.head_dim) is none that vLLM has on CPU: "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )


def mend() -> list[str]:
    """Repair what the probes find, before an engine is built; returns the names of what was repaired.

    Raises:
        RuntimeError: a repair that does not take; the engine must not be used.
    """
    found = [entry for entry in MENDS if entry.shows()]
    for entry in found:
        entry.repair()
        if entry.shows():
            raise RuntimeError(f"vLLM on CPU: {entry.name} could not be repaired; effect: {entry.effect}")
    return [entry.name for entry in found]


def _expand_drops_its_result() -> bool:
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    out = torch.full((3,), -1.0)
    cpu_triton_utils._expand_kernel_impl(out, torch.tensor([0.25, 0.5]), torch.tensor([1, 3]), 0, 0)
    return out.tolist() != [0.25, 0.5, 0.5]


def _write_expanded() -> None:
    from vllm.utils import cpu_triton_utils

    def _expand_kernel_impl(
        output: torch.Tensor,  # [tokens], any dtype
        input_val: torch.Tensor,  # [requests]
        cu_num_tokens: torch.Tensor,  # [requests], running sum of tokens
        replace_from: int,
        replace_to: int,
        MAX_NUM_TOKENS: int | None = None,
    ) -> None:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        output.copy_(torch.repeat_interleave(values, counts, output_size=output.shape[0]))

    cpu_triton_utils._expand_kernel_impl = _expand_kernel_impl


def _top_k_fails_on_no_rows() -> bool:
    from vllm.v1.sample.ops import topk_topp_sampler

    try:
        topk_topp_sampler.apply_top_k_only(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except (RuntimeError, IndexError):  # "max(): expected reduction dim to be specified for ..."
        return True
    return False


def _skip_no_rows() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    original = topk_topp_sampler.apply_top_k_only

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return original(logits, k) if logits.shape[0] else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only


class _NoMapping:
    """Its `__dict__` is no mapping, as with the library wrappers of llvmlite (numba)."""

    @property
    def __dict__(self) -> object:  # type: ignore[override]
        return object()


def _rebind_fails_on_odd_objects() -> bool:
    from vllm.triton_utils import dispatcher

    real_sys = dispatcher.sys
    modules = {"probe": types.SimpleNamespace(odd=_NoMapping())}
    dispatcher.sys = types.SimpleNamespace(modules=modules)  # pyrefly: ignore[bad-assignment]
    try:
        dispatcher._rebind_kernels([])
    except AttributeError:
        return True
    finally:
        dispatcher.sys = real_sys
    return False


def _read_only_mappings() -> None:
    from vllm.triton_utils import dispatcher

    def safe_vars(value: object) -> dict | types.MappingProxyType:
        found = getattr(value, "__dict__", None)
        return found if isinstance(found, (dict, types.MappingProxyType)) else {}

    # Shadows the builtin in that module alone.
    dispatcher.vars = safe_vars  # pyrefly: ignore[missing-attribute]


MENDS = (
    Mend(
        name="expand_kernel writes to a copy",
        upstream="https://github.com/vllm-project/vllm/issues/55005 (fix: pull request 55006)",
        seen_in="0.26 to 0.33",
        effect="speculation with temperature, top_k or top_p samples from the wrong distribution",
        shows=_expand_drops_its_result,
        repair=_write_expanded,
    ),
    Mend(
        name="top-k of no rows",
        upstream="not reported",
        seen_in="0.32 to 0.33",
        effect="top_k with speculation dies at the first step without draft tokens",
        shows=_top_k_fails_on_no_rows,
        repair=_skip_no_rows,
    ),
    Mend(
        name="kernel overrides meet objects without a mapping for __dict__",
        upstream="not reported",
        seen_in="0.32 to 0.33",
        effect="once numba is imported, building an engine dies in _rebind_kernels",
        shows=_rebind_fails_on_odd_objects,
        repair=_read_only_mappings,
    ),
)
