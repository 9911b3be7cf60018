"""Small training runs that record their rollouts, one after another in forks of this process.

    python durable_run.py '[{"log": ..., "kill_at": 0, "overrides": [...]}, ...]'

A file LOG gets a line per rollout. In step `kill_at` (0: never) the process kills itself once the rollouts are
there; in step `stop_at` it gets a SIGTERM in the middle of the "rollout", or a Ctrl-C in that of the "update", as
`stop_in` says. Prints each fork's exit status.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import traceback
from itertools import count
from typing import Any

import torch

from torchspec.config.load import load
from torchspec.records import Problem, Rollout
from torchspec.rollout.engine import Request, Sampling
from torchspec.rollout.vllm import setup as vllm_setup
from torchspec.trainer import Trainer

SMALL = {
    "model.max_len": 80,
    "model.tiny.dim": 32,
    "model.tiny.layers": 3,
    "model.tiny.heads": 2,
    "model.tiny.kv_heads": 1,
    "model.tiny.head_dim": 32,
    "model.tiny.ffn_dim": 64,
    "draft.aux_layers": [1, 2, 3],
    "draft.ttt_steps": 3,
    "draft.optim.lr": 5e-2,
    "draft.train_every": 2,
    "optim.lr": 1e-2,
    "data.size": 16,
    "data.eval_size": 4,
    "reward.functions": ["durable_run.evenness"],
    "rollout.problems_per_step": 4,
    "rollout.samples_per_problem": 3,
    "rollout.max_new_tokens": 16,
    "rollout.num_draft_tokens": 3,
    "rollout.drafter": "hybrid",
    "suffix.max_draft": 6,
    "rollout.kv_cache_gb": 0.02,
    "rl.overlong": "keep",
    "eval.every": 5,
    "eval.frozen_draft": True,
    "checkpoint.every": 5,
    "train.pack_tokens": 256,
    "run.steps": 10,
}


def evenness(problem: Problem, response: str) -> float:
    """A reward that any policy can raise."""
    return sum(ord(c) % 2 == 0 for c in response) / max(1, len(response))


class Recording(Trainer):
    def __init__(
        self, log: str, overrides: list[str], kill_at: int = 0, stop_at: int = 0, stop_in: str = ""
    ) -> None:
        self.log, self.kill_at, self.stop_at, self.stop_in = log, kill_at, stop_at, stop_in
        defaults = [f"--{key}={json.dumps(value)}" for key, value in SMALL.items()]
        super().__init__(load(None, [*defaults, *overrides]))

        self._of_engine = self.engine.generate
        self.engine.generate = self._recorded

    def _recorded(self, requests: list[Request], sampling: Sampling) -> list[Rollout]:
        if self.progress.done + 1 == self.stop_at:
            self._stop_in_the_middle()
        rollouts = self._of_engine(requests, sampling)
        with open(f"{self.log}.{self.mesh.rank}", "a") as out:
            for rollout in rollouts:
                out.write(json.dumps({"done": self.progress.done, **dataclasses.asdict(rollout)}) + "\n")
        if self.progress.done + 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rollouts

    def _stop_in_the_middle(self) -> None:
        if self.stop_in == "rollout":
            # Once the engine has made some tokens: at its third look for what to schedule.
            scheduler, steps = self.engine._llm.llm_engine.engine_core.engine_core.scheduler, count(1)
            schedule = scheduler.schedule

            def signalled(*args: Any, **kwargs: Any) -> Any:
                if next(steps) == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                return schedule(*args, **kwargs)

            scheduler.schedule = signalled
        else:  # between the packs of the update
            forward, calls = self.learner.policy.forward, count(1)

            def signalled(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                return forward(*args, **kwargs)

            self.learner.policy.forward = signalled


def run(scenario: dict[str, Any]) -> None:
    trainer = Recording(**scenario)
    trainer.fit()
    trainer.close()


def main(scenarios: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    vllm_setup.prepare_environment("cpu")
    importlib.import_module("vllm.v1.worker.cpu_worker")  # most of a fork's time otherwise
    importlib.import_module("vllm.v1.engine.llm_engine")
    for scenario in scenarios:
        if (child := os.fork()) == 0:
            status = 1
            try:
                run(scenario)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print("exit status", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
