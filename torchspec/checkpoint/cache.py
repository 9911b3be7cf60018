"""The cache that several runs of one run.dir share: what a folder of it depends on, and how it appears whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from torchspec.config.schema import Config
from torchspec.distributed.mesh import Mesh


def cache_folder(config: Config) -> Path:
    """Return the folder that all runs of one run.dir share."""
    return Path(config.run.dir) / "cache"


def fingerprint(*parts: Any) -> str:
    """Return twelve hex digits that change whenever a part (a plain value or a config section) does."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def contents(*paths: str | Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files a run starts from: its cached results depend on them."""
    files = [
        f
        for p in map(Path, filter(str, paths))
        for f in (sorted(p.iterdir()) if p.is_dir() else [p])
        if f.is_file()
    ]
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def remove_folder(folder: Path, mesh: Mesh) -> None:
    """Remove a folder, if it is there, on the main rank; all ranks wait for it."""
    if mesh.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    mesh.barrier()


def private_name(folder: Path, mesh: Mesh) -> Path:
    """Return a folder of this process's own, beside `folder`, that does not exist yet. Collective."""
    private = folder.with_name(mesh.from_main(f".{folder.name}.{socket.gethostname()}.{os.getpid()}"))
    if mesh.is_main:  # of an earlier process with this number
        shutil.rmtree(private, ignore_errors=True)
    mesh.barrier()
    return private


def publish(private: Path, folder: Path, mesh: Mesh) -> bool:
    """Give a complete private folder its name. Collective.

    Returns:
        False where another run has made `folder` meanwhile, which stays; the private one is removed.
    """
    mesh.barrier()
    was_first = True
    if mesh.is_main:
        try:
            private.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            was_first = False
            shutil.rmtree(private)
    return mesh.from_main(was_first)
