"""Worlds of gloo processes for tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchspec.config.schema import Parallel
from torchspec.distributed.mesh import Mesh


def run_world(
    size: int,
    worker: Callable[..., Any],
    folder: Path,
    *args: Any,
    timeout_s: float = 400,
    parallel: Parallel | None = None,
) -> list[Any]:
    """Run `worker(mesh, *args)` on `size` ranks; returns what each rank returned, by rank.

    Args:
        worker: a function at the top level of a module.
        folder: an empty folder for the results, which travel as files.
        parallel: of the mesh; None: dp_shard takes all ranks.

    Raises:
        RuntimeError: a rank failed; carries its traceback. The other ranks are killed.
        TimeoutError: the world did not end in time; all ranks are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=_rank, args=(rank, size, port, parallel or Parallel(), worker, folder, args))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.is_alive() for process in ranks):
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            if failed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{worker.__name__} on {size} ranks took longer than {timeout_s} s")
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    errors = [path.read_text() for rank in range(size) if (path := folder / f"{rank}.error").exists()]
    if errors or any(process.exitcode for process in ranks):
        raise RuntimeError("\n".join(errors) or f"exit codes {[process.exitcode for process in ranks]}")
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(size)]


def _rank(
    rank: int,
    size: int,
    port: int,
    parallel: Parallel,
    worker: Callable[..., Any],
    folder: Path,
    args: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    status = 0
    try:
        result = worker(Mesh(parallel, device="cpu"), *args)
        torch.save(result, folder / f"{rank}.result")
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        status = 1
    # gloo's static destructors now and then abort a process that has already succeeded.
    os._exit(status)
