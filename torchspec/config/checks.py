"""Refuse impossible values and combinations, before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchspec.config.keys import keys
from torchspec.config.schema import Config, longest_draft
from torchspec.errors import ConfigError

MAX_DRAFT = 128
"""vLLM's MAX_SPEC_LEN."""


def check(config: Config) -> None:
    """Refuse impossible values and combinations.

    Raises:
        ConfigError: the key, its value, what is allowed.
    """
    for key in keys(config):
        for number in _floats(key.value):
            _require(math.isfinite(number), f"{key.name} = {number} must be a finite number")
        if key.bounds and not key.bounds.allow(key.value):
            why = f" ({key.bounds.why})" if key.bounds.why else ""
            raise ConfigError(f"{key.name} = {key.value} must be {key.bounds}{why}")
    _check_draft(config)
    _check_rollout(config)
    _check_speculation(config)
    _check_sources(config)
    _check_pipeline(config)


def _floats(value: Any) -> Iterator[float]:
    """Yield the floats in a key's value, which may be a list or a dict."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)
    elif isinstance(value, float):
        yield value


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_draft(config: Config) -> None:
    draft, warmup = config.draft, config.warmup
    ids = draft.aux_layers
    _require(
        ids == sorted({i for i in ids if i >= 0}),
        f"draft.aux_layers = {ids} must be ascending layer ids, or [] for the default",
    )
    if draft.heads and draft.kv_heads:
        _require(
            draft.heads % draft.kv_heads == 0,
            f"draft.heads = {draft.heads} must be a multiple of draft.kv_heads = {draft.kv_heads}",
        )
    _require(
        warmup.draft_steps <= warmup.steps,
        f"warmup.draft_steps = {warmup.draft_steps} cannot exceed warmup.steps = {warmup.steps}",
    )
    if not draft.enabled:
        _require(warmup.draft_steps == 0, "warmup.draft_steps > 0 needs draft.enabled = true")
        _require(not config.eval.frozen_draft, "eval.frozen_draft = true needs draft.enabled = true")
        _require(config.checkpoint.best != "tau", 'checkpoint.best = "tau" needs draft.enabled = true')
    if config.eval.frozen_draft:
        _require(config.eval.every > 0, "eval.frozen_draft = true needs eval.every > 0")


def _check_rollout(config: Config) -> None:
    rollout, rl, tiny = config.rollout, config.rl, config.model.tiny
    _require(
        rollout.max_new_tokens < config.model.max_len,
        f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt in "
        f"model.max_len = {config.model.max_len}",
    )
    _require(
        rl.minibatches <= rollout.problems_per_step,
        f"rl.minibatches = {rl.minibatches} cannot exceed "
        f"rollout.problems_per_step = {rollout.problems_per_step}",
    )
    _require(
        tiny.heads % tiny.kv_heads == 0,
        f"model.tiny.heads = {tiny.heads} must be a multiple of model.tiny.kv_heads = {tiny.kv_heads}",
    )
    _require(tiny.head_dim % 2 == 0, f"model.tiny.head_dim = {tiny.head_dim} must be even (RoPE)")
    shards = config.parallel.dp_shard
    _require(shards == -1 or shards >= 1, f"parallel.dp_shard = {shards} must be -1 or at least 1")


def _check_speculation(config: Config) -> None:
    drafter, budget = config.rollout.drafter, config.budget
    if config.draft.enabled:
        _require(
            drafter != "suffix",
            "rollout.drafter = 'suffix' would leave the draft unused: "
            "set draft.enabled = false, or rollout.drafter = 'hybrid'",
        )
    else:
        _require(drafter != "hybrid", "rollout.drafter = 'hybrid' needs draft.enabled = true")
    longest = longest_draft(config)
    _require(
        longest <= MAX_DRAFT,
        f"a draft of {longest} tokens (rollout.num_draft_tokens, suffix.max_draft) is beyond the {MAX_DRAFT} "
        "that vLLM verifies",
    )
    if budget.rule == "fixed":
        _require(
            budget.fixed_tokens <= longest,
            f"budget.fixed_tokens = {budget.fixed_tokens} is beyond the drafter's {longest} tokens "
            "(rollout.num_draft_tokens, suffix.max_draft)",
        )
    tokens = budget.class_tokens
    _require(
        len(tokens) == 3 and 0 <= tokens[0] <= tokens[1] <= tokens[2],
        f"budget.class_tokens = {tokens} must be three ascending numbers: short, medium, long requests",
    )
    _require(
        budget.short_below <= budget.long_from,
        f"budget.short_below = {budget.short_below} cannot exceed budget.long_from = {budget.long_from}",
    )
    _require(
        not budget.cost_table or Path(budget.cost_table).is_file(),
        f"budget.cost_table = {budget.cost_table!r}: there is no such file",
    )


def _check_sources(config: Config) -> None:
    data, name = config.data, config.run.name
    _require(
        re.fullmatch(r"[\w.-]+", name) is not None and name not in (".", "..", "cache"),
        f"run.name = {name!r} must be a plain folder name (letters, digits, - _ .), and not 'cache'",
    )
    _require(bool(config.model.source), 'model.source is empty; a folder, a hub id, or "tiny"')
    if data.source != "reasoning_gym":
        _require(bool(data.path), f"data.source = {data.source!r} needs data.path")
    _require(
        config.eval.every == 0 or data.eval_size > 0,
        "eval.every > 0 needs data.eval_size > 0",
    )
    _require(
        data.size == 0 or data.size >= config.rollout.problems_per_step,
        f"data.size = {data.size} must be 0 or at least rollout.problems_per_step",
    )


def _check_pipeline(config: Config) -> None:
    parallel, sizes = config.parallel, config.parallel.layers_per_stage
    _require(
        parallel.schedule != "ZBVZeroBubble" or not config.train.activation_checkpointing,
        "parallel.schedule = 'ZBVZeroBubble' runs every backward in two parts, and activations can be "
        "recomputed for one of them only; set train.activation_checkpointing = false, or take another schedule",
    )
    if not sizes:
        return
    _require(parallel.pp > 1, "parallel.layers_per_stage needs parallel.pp > 1")
    _require(min(sizes) >= 1, f"parallel.layers_per_stage = {sizes}: every stage needs a layer")
    per_rank = {"ZBVZeroBubble": 2, "Interleaved1F1B": max(2, len(sizes) // parallel.pp)}
    wanted = parallel.pp * per_rank.get(parallel.schedule, 1)
    _require(
        len(sizes) == wanted,
        f"parallel.layers_per_stage = {sizes}: {parallel.schedule} over parallel.pp = {parallel.pp} ranks "
        f"has {wanted} stages, not {len(sizes)}",
    )
