"""A rank that dies in the middle of a run's loop, for torchrun: the others wait for it in `Interrupt.check`."""

from __future__ import annotations

import os
import signal

from torchspec.config.schema import Parallel
from torchspec.distributed.interrupt import Interrupt
from torchspec.distributed.mesh import Mesh

mesh = Mesh(Parallel(), device="cpu")
with Interrupt(mesh) as interrupt:
    for step in range(10**9):
        interrupt.check()
        if step == 20 and mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
