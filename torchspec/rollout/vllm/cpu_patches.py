"""Patches for defects of vLLM on CPU; each is applied only where its probe finds the defect.

Imports vLLM inside functions only. `tests/e2e/test_vllm_cpu_patches.py` runs every probe against the pristine
library: when it fails because a probe finds nothing, upstream has repaired it and the entry here can go.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from torchspec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Patch:
    name: str
    upstream: str
    """Where it is reported."""
    seen_in: str
    """vLLM versions whose source has the defect."""
    effect: str
    is_needed: Callable[[], bool]
    """The probe: True where the defect is there."""
    apply: Callable[[], None]


HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPU has kernels for."""


def check_head_dim(head_dim: int) -> None:
    """Refuse a policy whose attention vLLM cannot compute on CPU; vLLM itself says so deep in its first step."""
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"the policy's head_dim = {head_dim} (model.tiny.head_dim) is none that vLLM has on CPU: "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )


def apply_patches() -> list[str]:
    """Apply the patches that are needed, before an engine is built; return their names.

    Raises:
        RuntimeError: a patch has no effect; the engine must not be used.
    """
    found = [entry for entry in PATCHES if entry.is_needed()]
    for entry in found:
        entry.apply()
        if entry.is_needed():
            raise RuntimeError(f"vLLM on CPU: {entry.name} could not be patched; effect: {entry.effect}")
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


def _draws_noise_for_nobody() -> bool:
    from vllm.v1.sample import rejection_sampler

    none, before = torch.empty(0, dtype=torch.int32), torch.get_rng_state()
    settings: Any = types.SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(1), generators={}
    )
    # The kernels are no CPU ones before an engine is built; nobody's drafts are no work for them.
    kernels = dict.fromkeys(("_sample_recovered_tokens", "_rejection_random_sample"), mock.DEFAULT)
    with mock.patch.multiple(rejection_sampler, **kernels):
        rejection_sampler.rejection_sample(
            none, [0], 0, none.new_zeros(1), None, torch.empty(0, 8), none.new_zeros(1, 1), settings
        )
    drawn = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    return drawn


def _draw_where_rejected() -> None:
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.rejection_sample

    def rejection_sample(
        draft_token_ids: torch.Tensor,  # int32 [n]
        num_draft_tokens: list[int],  # of each of B requests
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,  # float32 [n, V]; None: one-hot
        target_logits: torch.Tensor,  # float32 [n, V]
        bonus_token_ids: torch.Tensor,  # int [B, 1]
        sampling_metadata: Any,
        **options: Any,  # what vLLM names: synthetic_mode and others that sampling does not use
    ) -> torch.Tensor:  # int32 [B, max_spec_len + 1], -1 behind what was sampled
        if not sampling_metadata.all_random or options.get("synthetic_mode"):
            return original(
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                bonus_token_ids, sampling_metadata, **options,
            )  # fmt: skip
        generators = sampling_metadata.generators
        tokens = draft_token_ids.long().clamp(min=0)[:, None]  # -1 holds a place, and is rejected
        uniform = rejection_sampler.generate_uniform_probs(
            len(tokens), num_draft_tokens, generators, target_logits.device
        )
        probs = target_logits.softmax(dim=-1, dtype=torch.float32)
        proposed = 1.0 if draft_probs is None else draft_probs.gather(1, tokens)[:, 0].double()
        accepted = (draft_token_ids >= 0) & (uniform * proposed < probs.gather(1, tokens)[:, 0])
        accepted = (accepted & (proposed > 0)).tolist()
        out = draft_token_ids.new_full((len(num_draft_tokens), max_spec_len + 1), -1)
        first = 0
        for i, count in enumerate(num_draft_tokens):
            hits = [*accepted[first : first + count], False].index(False)
            row = first + hits
            out[i, :hits] = draft_token_ids[first:row]
            if hits == count:
                out[i, hits] = bonus_token_ids[i, 0]
            else:
                if draft_token_ids[row] < 0:  # nothing was proposed
                    rest = probs[row]
                elif draft_probs is None:
                    rest = probs[row].index_fill(0, tokens[row], 0.0)
                else:
                    rest = (probs[row] - draft_probs[row]).clamp_(min=0.0)
                out[i, hits] = _one_of(rest if rest.any() else probs[row], generators.get(i))
            first += count
        return out

    rejection_sampler.rejection_sample = rejection_sample  # pyrefly: ignore[bad-assignment]  # its last options by name


def _one_of(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw an index with chances in proportion to `weights` [V], by one uniform number."""
    sums = weights.cumsum(0, dtype=torch.float64)
    drawn = torch.rand((), dtype=torch.float64, generator=generator)  # times the sum it is below the sum
    return torch.searchsorted(sums, drawn * sums[-1], right=True)


def _scores_padding() -> bool:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    scored = []

    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        scored.append(len(logits))
        return logits

    def gather_logprobs(logprobs: torch.Tensor, count: int, tokens: torch.Tensor) -> LogprobsTensors:
        return LogprobsTensors(tokens[:, None], logprobs[:, :1], tokens)

    sampler: Any = types.SimpleNamespace(
        is_logits_logprobs_mode=False,
        sampler=types.SimpleNamespace(compute_logprobs=compute_logprobs, gather_logprobs=gather_logprobs),
    )
    metadata = SpecDecodeMetadata.make_dummy([[5, 6], []], torch.device("cpu"))
    RejectionSampler._get_logprobs_tensors(
        sampler, 0, metadata, torch.zeros(4, 8), torch.zeros(2, 8), torch.zeros(2, 8), torch.tensor([[7, -1, -1]] * 2)
    )  # fmt: skip
    return scored != [2]


def _score_what_was_sampled() -> None:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    def _get_logprobs_tensors(
        self: RejectionSampler,
        max_num_logprobs: int,
        metadata: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,  # [n, V]: of the draft tokens
        bonus_logits: torch.Tensor,  # [B, V]
        sampled_token_ids: torch.Tensor,  # int [B, max_spec_len + 1], -1 behind what was sampled
    ) -> LogprobsTensors:
        request, position = (sampled_token_ids >= 0).nonzero(as_tuple=True)
        counts = torch.tensor(metadata.num_draft_tokens)
        first = counts.cumsum(0) - counts
        bonus = position == counts[request]
        rows = torch.empty(len(request), target_logits.shape[-1], dtype=torch.float32)
        rows[bonus] = bonus_logits[request[bonus]]
        rows[~bonus] = target_logits[(first[request] + position)[~bonus]]
        found = self.sampler.gather_logprobs(
            rows if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(rows),
            max_num_logprobs,
            sampled_token_ids[request, position].long(),
        )
        places = request * sampled_token_ids.shape[1] + position

        def padded(part: torch.Tensor) -> torch.Tensor:  # vLLM filters the other places out
            full = part.new_zeros(sampled_token_ids.numel(), *part.shape[1:])
            return full.index_copy_(0, places, part)

        return LogprobsTensors(
            padded(found.logprob_token_ids), padded(found.logprobs), padded(found.selected_token_ranks)
        )

    RejectionSampler._get_logprobs_tensors = _get_logprobs_tensors


PATCHES = (
    Patch(
        name="expand_kernel writes to a copy",
        upstream="https://github.com/vllm-project/vllm/issues/55005 (fix: pull request 55006)",
        seen_in="0.26 to 0.33",
        effect="speculation with temperature, top_k or top_p samples from the wrong distribution",
        is_needed=_expand_drops_its_result,
        apply=_write_expanded,
    ),
    Patch(
        name="top-k of no rows",
        upstream="not reported",
        seen_in="0.32 to 0.33",
        effect="top_k with speculation dies at the first step without draft tokens",
        is_needed=_top_k_fails_on_no_rows,
        apply=_skip_no_rows,
    ),
    Patch(
        name="kernel overrides meet objects without a mapping for __dict__",
        upstream="not reported",
        seen_in="0.32 to 0.33",
        effect="once numba is imported, building an engine dies in _rebind_kernels",
        is_needed=_rebind_fails_on_odd_objects,
        apply=_read_only_mappings,
    ),
    Patch(
        name="noise for recovered tokens",
        upstream="not reported",
        seen_in="0.32 to 0.33",
        effect="a step with speculation draws B * V exponential numbers, twice where requests are seeded, before it "
        "knows what is rejected: with the next defect about 12 % of a small model's step without drafts",
        is_needed=_draws_noise_for_nobody,
        apply=_draw_where_rejected,
    ),
    Patch(
        name="logprobs of padding",
        upstream="not reported (on accelerators it spares a synchronization)",
        seen_in="0.32 to 0.33",
        effect="logits of B * (longest draft + 1) positions are copied and normalised, accepted or not",
        is_needed=_scores_padding,
        apply=_score_what_was_sampled,
    ),
)
