"""Fault harness: forks savers, kills each at some instant, and looks at what is left on the disk.

Half of the instants are random; the others are before the 1st, 2nd, ... operation on the file system, which
random ones would rarely hit.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from torchspec.checkpoint.checkpoint import Checkpoints, damage, newest, restore
from torchspec.config.schema import Checkpoint, Optim, Parallel
from torchspec.distributed.mesh import Mesh
from torchspec.training.optim import ModelOptimizer


def models() -> dict[str, ModelOptimizer]:
    """Their weights say which step they are of."""
    return {
        name: ModelOptimizer(name, nn.Linear(64, 512), Optim(lr=0.0), total_steps=10**6)
        for name in ("policy", "draft")
    }


OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def die_before(operation: int) -> None:
    """Kill this process before its n-th operation on the file system from now on."""
    left = operation

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def save_for_ever(folder: Path, set_queue_depth: Path, ready: int, operation: int) -> None:
    """Writes to the pipe `ready` after its first save, and then, unless 0, dies before a file operation."""
    mesh = Mesh(Parallel(), device="cpu")
    optimizers = models()
    saved = newest(folder)
    if saved:
        restore(saved, mesh, optimizers, {})
    step = saved.step if saved else 0
    checkpoints = Checkpoints(folder, mesh, Checkpoint(keep_last=2, keep_best=1))
    while True:
        step += 1
        for optimizer in optimizers.values():
            for p in optimizer.model.parameters():
                p.data.fill_(step)
                p.grad = torch.zeros_like(p)
            optimizer.step()
        checkpoints.save({"step": step, "scores": {"reward": -step % 7}}, optimizers, {})
        if step % 2:  # every other save overlaps with the next step
            checkpoints.wait()
            set_queue_depth.write_text(str(step))
            if operation:
                die_before(operation)
                operation = 0
            os.write(ready, b".")


def warm_up(folder: Path) -> None:
    """One save and load, so that the forks need not import what torch imports late."""
    mesh = Mesh(Parallel(), device="cpu")
    checkpoints = Checkpoints(folder, mesh, Checkpoint())
    checkpoints.save({"step": 1}, models(), {})
    checkpoints.close()
    saved = newest(folder)
    assert saved
    restore(saved, mesh, models(), {})
    mesh.close()


def examine(folder: Path) -> tuple[int, bool]:
    """The step found; whether all of what was loaded is of that step, and no visible checkpoint is damaged."""
    saved = newest(folder)
    if saved is None or any(damage(path) for path in folder.glob("step-*")):
        return 0, False
    mesh = Mesh(Parallel(), device="cpu")
    optimizers = models()
    restore(saved, mesh, optimizers, {})
    mesh.close()
    values = {x.item() for o in optimizers.values() for p in o.model.parameters() for x in p.unique()}
    return saved.step, values == {float(saved.step)} and optimizers["policy"].updates == saved.step


def main(root: Path, instants: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folder, set_queue_depth = root / "checkpoints", root / "announced"
    folder.mkdir()
    warm_up(root / "warm")
    draw, report = random.Random(0), []
    for instant in range(instants):
        started, ready = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(
                    folder, set_queue_depth, ready, operation=instant // 2 + 1 if instant % 2 else 0
                )
            finally:
                os._exit(1)
        os.read(started, 1)
        if instant % 2 == 0:
            time.sleep(draw.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the saver ended by itself"
        os.close(started)
        os.close(ready)
        half = bool(list(folder.glob(".step-*")))
        # Examined in a fork too: this process must stay without threads of its own.
        reader, writer = os.pipe()
        if (examiner := os.fork()) == 0:
            result = json.dumps(examine(folder))
            os.write(writer, result.encode())
            os._exit(0)
        os.close(writer)
        found, loads = json.loads(os.read(reader, 100) or "[-1, false]")
        os.close(reader)
        os.waitpid(examiner, 0)
        text = set_queue_depth.read_text() if set_queue_depth.exists() else ""
        report.append({"found": found, "loads": loads, "announced": int(text or 0), "partial": half})
    (root / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
