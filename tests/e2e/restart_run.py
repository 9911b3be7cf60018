"""Small training runs on two ranks in which rank 1's engine dies, one after another in forks of this process.

    python restart_run.py '[{"log": ..., "dies": [2, 2], "overrides": [...]}, ...]'

`dies` are the steps in which it dies, in vLLM's step `at`; with one twice, the engine that was built in its place
dies too, and with `unbuilt` none can be built. All ranks' rollouts of every step go to LOG, a line each. Prints the
ranks' exit statuses (-9: they hung), and how long they took, by run.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import weakref
from collections import Counter
from typing import Any

import torch
from durable_run import SMALL

from torchspec.commands.main import main as command_line
from torchspec.config.load import load
from torchspec.records import Rollout
from torchspec.rollout.engine import Request, Sampling
from torchspec.rollout.vllm import setup as vllm_setup
from torchspec.rollout.vllm.engine import VllmEngine
from torchspec.trainer import Trainer

LIMIT_S = 120


def runner_of(engine: VllmEngine) -> Any:
    return engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner


def die_at(engine: VllmEngine, step: int, error: BaseException | None = None) -> None:
    """Let the runner raise in its `step`-th step from now, and in all that follow."""
    runner, steps = runner_of(engine), iter(range(1, 10**6))
    execute = runner.execute_model

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(steps) >= step:
            raise error or RuntimeError("the device fell off the bus")
        return execute(*args, **kwargs)

    runner.execute_model = dying


class Dying(Trainer):
    def __init__(
        self, log: str, dies: list[int], overrides: list[str], at: int = 20, unbuilt: bool = False
    ) -> None:
        self.log, self.dies, self.at, self.unbuilt = log, Counter(dies), at, unbuilt
        defaults = [f"--{key}={json.dumps(value)}" for key, value in SMALL.items()]
        super().__init__(load(None, [*defaults, *overrides]))
        self._of_engine, self.engine.generate = self.engine.generate, self._seeded
        self._revive, self.engine.restart = self.engine.restart, self._restart
        self._exchange, self.fleet.exchange = self.fleet.exchange, self._recorded

    def _seeded(self, requests: list[Request], sampling: Sampling) -> list[Rollout]:
        self._plant()
        return self._of_engine(requests, dataclasses.replace(sampling, seed=1000 * self.progress.done))

    def _restart(self) -> None:
        if self.unbuilt:
            raise RuntimeError("there is no device any more")
        runner = runner_of(self.engine)
        models = [
            weakref.ref(model)
            for model in (runner.model, self.learner.draft and runner.drafter.model)
            if model
        ]
        del runner
        self._revive()
        assert [model() for model in models] == [None] * len(models)  # their memory is free
        self._plant()

    def _plant(self) -> None:
        if self.mesh.rank == 1 and self.dies[self.progress.done + 1]:
            self.dies[self.progress.done + 1] -= 1
            die_at(self.engine, self.at)

    def _recorded(self, mine: list[tuple[int, Rollout]]) -> list[Rollout]:
        rollouts = self._exchange(mine)
        if self.mesh.is_main:
            with open(self.log, "a") as out:
                for rollout in rollouts:
                    out.write(
                        json.dumps({"step": self.progress.done + 1, **dataclasses.asdict(rollout)}) + "\n"
                    )
        return rollouts


def run(scenario: dict[str, Any], rank: int, port: int) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def train(_: list[str]) -> None:
        trainer = Dying(**scenario)
        trainer.fit()
        trainer.close()

    return command_line(train, ["run"], "")


def main(scenarios: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    vllm_setup.prepare_environment("cpu")
    importlib.import_module("vllm.v1.worker.cpu_worker")  # most of a fork's time otherwise
    importlib.import_module("vllm.v1.engine.llm_engine")
    for scenario in scenarios:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started, children = time.monotonic(), {}
        for rank in range(2):
            if (child := os.fork()) == 0:
                status = 1
                try:
                    status = run(scenario, rank, port)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children[child] = rank
        statuses = [0, 0]
        while children:
            if time.monotonic() - started > LIMIT_S:
                for child in children:
                    os.kill(child, signal.SIGKILL)
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                statuses[children.pop(child)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        print(json.dumps({"statuses": statuses, "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
