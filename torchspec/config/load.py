"""Fill the configuration from TOML and the command line, and refuse what cannot work.

Precedence: command line > TOML > defaults. `[section] key = value` in the file is `--section.key value` on
the command line. Whatever is wrong is a `ConfigError` with one line: where, what, and the way out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from torchspec.config.schema import Config, Optim, longest_draft
from torchspec.errors import ConfigError


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config: defaults, then the TOML file, then `--section.key value` overrides, then `check`.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, impossible value or combination.
    """
    config = Config()
    if path is not None:
        _apply_table(config, _read_toml(Path(path)), where=str(path), prefix="")
    for key, raw in _split_overrides(list(overrides)):
        _override(config, key, raw)
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"{path or 'command line'}: {error}") from None
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file (the shipped ones are in configs/)")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _apply_table(target: Any, table: dict[str, Any], *, where: str, prefix: str) -> None:
    hints = typing.get_type_hints(type(target))
    for key, value in table.items():
        dotted = prefix + key
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {dotted}; {_nearest(key, hints, prefix)}")
        current = getattr(target, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {dotted} is a section, write [{dotted}]")
            _apply_table(current, value, where=where, prefix=dotted + ".")
        else:
            setattr(target, key, _typed(value, hints[key], f"{where}: {dotted}"))


def _nearest(key: str, valid: dict[str, Any], prefix: str) -> str:
    close = difflib.get_close_matches(key, valid, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"valid keys here: {', '.join(sorted(valid))}"


def _typed(value: Any, hint: Any, label: str) -> Any:
    """`value` as the field's type; an int is a float's value, nothing else is converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), map(str, args), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{label} = {value!r} is not allowed; {hint}one of: {', '.join(map(str, args))}"
            )
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(f"{label} must be a list of {args[0].__name__}, got {value!r}")
        return [_typed(item, args[0], f"{label}[{i}]") for i, item in enumerate(value)]
    kind = origin or hint
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{label} must be {kind.__name__}, got {type(value).__name__} {value!r}")
    return value


def _split_overrides(argv: list[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"command line: unexpected {flag!r}; overrides are --section.key value")
        key, has_equals, raw = flag[2:].partition("=")
        if not has_equals:
            if not rest:
                raise ConfigError(f"command line: {flag} needs a value")
            raw = rest.pop(0)
        pairs.append((key.replace("-", "_"), raw))
    return pairs


def _override(config: Config, dotted: str, raw: str) -> None:
    """Set one dotted key from its command-line text, read as a TOML value, or as a bare string."""
    target: Any = config
    *sections, key = dotted.split(".")
    for depth, name in enumerate(sections):
        prefix = "".join(s + "." for s in sections[:depth])
        hints = typing.get_type_hints(type(target))
        if name not in hints or not dataclasses.is_dataclass(getattr(target, name)):
            raise ConfigError(
                f"command line: unknown section {prefix}{name}; {_nearest(name, hints, prefix)}"
            )
        target = getattr(target, name)
    hints = typing.get_type_hints(type(target))
    value: Any = raw
    if hints.get(key) is not str:
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw
    prefix = "".join(s + "." for s in sections)
    _apply_table(target, {key: value}, where="command line", prefix=prefix)


MAX_DRAFT = 128
"""vLLM's MAX_SPEC_LEN."""

_AT_LEAST: dict[str, float] = {
    "run.steps": 1,
    "model.max_len": 2,
    "model.tiny.dim": 1,
    "model.tiny.layers": 1,
    "model.tiny.heads": 1,
    "model.tiny.kv_heads": 1,
    "model.tiny.head_dim": 2,
    "model.tiny.ffn_dim": 1,
    "draft.train_every": 0,
    "draft.ttt_steps": 1,
    "draft.vocab_size": 0,
    "draft.heads": 0,
    "draft.kv_heads": 0,
    "draft.ffn_dim": 0,
    "draft.loss_rows": 1,
    "draft.row_block": 0,
    "data.size": 0,
    "data.eval_size": 0,
    "reward.max_failures": 0,
    "rollout.problems_per_step": 1,
    "rollout.samples_per_problem": 2,
    "rollout.max_new_tokens": 1,
    "rollout.top_k": 0,
    "rollout.num_draft_tokens": 1,
    "rollout.max_num_seqs": 1,
    "rollout.kv_cache_gb": 0,
    "suffix.window": 0,
    "suffix.max_bytes": 1,
    "suffix.max_draft": 1,
    "budget.fixed_tokens": 0,
    "budget.short_below": 1,
    "rollout.tail_weight": 0,
    "rl.clip_high": 0,
    "rl.tis_cap": 0,
    "rl.kl_coef": 0,
    "rl.overlong_penalty": 0,
    "rl.minibatches": 1,
    "train.pack_tokens": 1,
    "train.logprob_rows": 1,
    "warmup.steps": 0,
    "warmup.problems_per_step": 1,
    "warmup.lr": 0,
    "warmup.draft_steps": 0,
    "eval.every": 0,
    "eval.samples_per_problem": 1,
    "checkpoint.every": 0,
    "guards.patience": 1,
    "guards.max_kl": 0,
    "guards.min_tau": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 0,
    "parallel.cp": 1,
    "parallel.pp": 1,
}


def check(config: Config) -> None:
    """Refuse impossible values and combinations, before anything is loaded.

    Raises:
        ConfigError: the key, its value, what is allowed.
    """
    for key, value in _numbers(dataclasses.asdict(config)):
        _require(math.isfinite(value), f"{key} = {value} must be a finite number")
    for key, low in _AT_LEAST.items():
        if (value := _get(config, key)) < low:
            raise ConfigError(f"{key} = {value} must be at least {low}")
    _check_optim(config.optim, "optim")
    _check_draft(config)
    _check_rollout(config)
    _check_speculation(config)
    _check_sources(config)
    _check_pipeline(config)


def _numbers(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float):
                yield prefix + key, item


def _get(config: Config, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_optim(optim: Optim, section: str) -> None:
    _require(optim.lr >= 0, f"{section}.lr = {optim.lr} must not be negative")
    _require(optim.clip >= 0, f"{section}.clip = {optim.clip} must not be negative (0 turns clipping off)")
    _require(optim.eps > 0, f"{section}.eps = {optim.eps} must be above 0")
    _require(optim.warmup_steps >= 0, f"{section}.warmup_steps = {optim.warmup_steps} must not be negative")
    _require(optim.weight_decay >= 0, f"{section}.weight_decay = {optim.weight_decay} must not be negative")
    for name in ("beta1", "beta2"):
        beta = getattr(optim, name)
        _require(0 <= beta < 1, f"{section}.{name} = {beta} must be in [0, 1)")
    ratio = optim.min_lr_ratio
    _require(0 <= ratio <= 1, f"{section}.min_lr_ratio = {ratio} must be in [0, 1]")


def _check_draft(config: Config) -> None:
    draft, warmup = config.draft, config.warmup
    _check_optim(draft.optim, "draft.optim")
    _require(0 < draft.pass_decay <= 1, f"draft.pass_decay = {draft.pass_decay} must be in (0, 1]")
    ids = draft.aux_layers
    _require(
        not ids or (len(ids) == 3 and ids[0] >= 0 and ids[0] < ids[1] < ids[2]),
        f"draft.aux_layers = {ids} must be three ascending layer ids, or [] for the default",
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
        rollout.temperature > 0,
        f"rollout.temperature = {rollout.temperature} must be above 0 (greedy samples cannot be trained on)",
    )
    _require(0 < rollout.top_p <= 1, f"rollout.top_p = {rollout.top_p} must be in (0, 1]")
    utilization = rollout.gpu_memory_utilization
    _require(0 < utilization < 1, f"rollout.gpu_memory_utilization = {utilization} must be in (0, 1)")
    _require(
        rollout.max_new_tokens < config.model.max_len,
        f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt in "
        f"model.max_len = {config.model.max_len}",
    )
    _require(0 <= rl.clip_low < 1, f"rl.clip_low = {rl.clip_low} must be in [0, 1)")
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
    drafter, budget, suffix = config.rollout.drafter, config.budget, config.suffix
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
    _require(0 < budget.capacity < 1, f"budget.capacity = {budget.capacity} must be between 0 and 1")
    _require(0 <= budget.focus <= 1, f"budget.focus = {budget.focus} must be in [0, 1]")
    _require(0 < suffix.recency <= 1, f"suffix.recency = {suffix.recency} must be in (0, 1]")


def _check_sources(config: Config) -> None:
    data, reward, name = config.data, config.reward, config.run.name
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
    _require(reward.timeout_s > 0, f"reward.timeout_s = {reward.timeout_s} must be above 0")


def _check_pipeline(config: Config) -> None:
    parallel, sizes = config.parallel, config.parallel.layers_per_stage
    _require(
        parallel.tap_timeout_s > 0,
        f"parallel.tap_timeout_s = {parallel.tap_timeout_s} must be above 0",
    )
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
