"""Folders of `run.dir/cache`, which several runs share: each is made under a private name and appears whole."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from torchspec.distributed.mesh import Mesh


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
