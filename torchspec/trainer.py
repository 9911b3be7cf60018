"""The training run: rollouts, rewards, one update of policy and draft, refit; step after step."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Container, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchspec.build import (
    base_folder,
    build_draft,
    build_learner,
    build_policy,
    cache_folder,
    check_draft,
    check_world,
    compute_dtype,
    contents,
    draft_spec,
    draft_trainer,
    fingerprint,
    load_tokenizer,
    sampling_of,
    score,
    special_ids,
)
from torchspec.checkpoint.checkpoint import Checkpoints, Component, newest, reseed, restore
from torchspec.checkpoint.export import export_draft, export_policy, load_draft
from torchspec.checkpoint.run_folder import all_ranks_see, create_run_folder, find_run, note, note_resumption
from torchspec.config.schema import Config, Optim, longest_draft
from torchspec.data.problems import load_problems
from torchspec.data.prompts import prompts_by_id
from torchspec.data.sampler import ProblemOrder
from torchspec.data.sources import data_files
from torchspec.distributed.interrupt import Interrupt
from torchspec.distributed.mesh import Mesh
from torchspec.errors import GuardStop, NonFinite, RewardFailed, Stopped
from torchspec.metrics.meter import (
    Meter,
    MetricWriter,
    add_tau,
    console_line,
    farewell,
    peak_memory_gb,
    rollout_metrics,
    simulated_tau,
    speculation_metrics,
)
from torchspec.metrics.plots import draw_plots
from torchspec.models.hf import load_hf
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.records import Problem, Rollout, SpecStats
from torchspec.rewards.advantages import group_advantages
from torchspec.rewards.scorer import build_scorer
from torchspec.rollout.engine import Request
from torchspec.rollout.files import write_rollouts
from torchspec.rollout.fleet import Fleet
from torchspec.rollout.vllm import cpu_patches as vllm_cpu
from torchspec.rollout.vllm.engine import VllmEngine, check_version
from torchspec.speculation.lengths import LengthStats
from torchspec.training import warmup
from torchspec.training.guards import Guards
from torchspec.training.learner import DraftLearner, Learner
from torchspec.training.optim import ModelOptimizer
from torchspec.training.refit import FrozenCopy, HasWeights, refit


class Trainer:
    """Everything a run holds, on one rank.

    Building it does all that can fail on the user's input, cheapest first: problems, rewards, tokenizer and
    prompt lengths before weights, weights before the engine.

    Raises:
        ConfigError: what the config asks for cannot be done.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.problems, self.held_out = load_problems(config.data)
        self.scorer = build_scorer(config.reward, config.data)
        readable = self.scorer.check_answers([*self.problems, *self.held_out])
        self._keep_problems({problem.id for problem in readable})
        self.mesh = Mesh(config.parallel)
        check_version(self.mesh.device.type)
        check_world(config, self.mesh, len(self.problems), len(self.held_out))
        self.base = base_folder(config, self.mesh)
        self.spec = PolicySpec.from_hf(self.base, config.model.max_len)
        if self.mesh.device.type == "cpu":
            vllm_cpu.check_head_dim(self.spec.head_dim)
        self.tokenizer = load_tokenizer(self.base, self.spec)
        longest = config.model.max_len - config.rollout.max_new_tokens
        known = [*self.problems, *self.held_out]
        self.prompts = prompts_by_id(self.tokenizer, known, longest, config.data.overlong)
        if len(self.prompts) < len(known):
            self._keep_problems(self.prompts)
            check_world(config, self.mesh, len(self.problems), len(self.held_out))
        self.draft_spec = draft_spec(config, self.spec) if config.draft.enabled else None
        check_draft(config, self.base)
        warmup.check(config, self.problems, self.tokenizer)
        self.folder, resumes = find_run(config)
        found = newest(self.folder / "checkpoints") if resumes and self.mesh.is_main else None
        self.saved = self.mesh.from_main(found)  # all ranks have looked before one makes the folder

        self._build_models()
        policy_folder, draft_folder = self._warm_up()
        self.order = ProblemOrder(self.problems, config.run.seed)
        self.guards = Guards(config)
        self.learner = self._reinforce_learner(policy_folder)
        self.policy_version = self.draft_version = 0
        lengths = LengthStats(default=config.rollout.max_new_tokens)
        steps_per_epoch = -(-len(self.problems) // config.rollout.problems_per_step)
        self.engine = VllmEngine(
            config,
            policy_folder=policy_folder,
            draft_folder=draft_folder,
            seed=config.run.seed + self.mesh.rank,
            device_type=self.mesh.device.type,
            lengths=lengths,
            window=max(16, 2 * steps_per_epoch),
        )
        self.fleet = Fleet(self.mesh, self.engine, lengths, config.rollout.tail_weight)
        self.frozen_draft = FrozenCopy(self.draft) if self.draft and config.eval.frozen_draft else None
        self.done = self.saved_step = 0
        self.scores: dict[str, float | None] = {}
        self.interrupt = Interrupt(self.mesh)
        if self.saved:
            self._resume()
        elif self.mesh.is_main:  # nothing of an earlier run is removed before this one can start
            create_run_folder(config, self.folder)
            if self.engine.cost:
                self.engine.cost.save(self.folder / "cost.json")
        self.mesh.barrier()
        self.checkpoints = Checkpoints(self.folder / "checkpoints", self.mesh, config.checkpoint)

    def fit(self) -> None:
        """The steps that are left, then export and plots."""
        config = self.config
        writer = MetricWriter(self.folder, self.done) if self.mesh.is_main else None
        if config.eval.every and not self.done:
            values = self._evaluate()
            if writer:
                writer.write(0, values)
        started, first = time.perf_counter(), self.done + 1
        with self.interrupt:  # to the end of `_stop`: a second signal must not break the last checkpoint
            try:
                for step in range(first, config.run.steps + 1):
                    values = self.step(step)
                    if config.eval.every and (step % config.eval.every == 0 or step == config.run.steps):
                        values |= self._evaluate()
                    if writer:
                        writer.write(step, values)
                    self.guards.look(step, values)
                    if config.checkpoint.every and step % config.checkpoint.every == 0:
                        self._save(self._states())
                    spent = (time.perf_counter() - started) / (step - first + 1)
                    left = spent * (config.run.steps - step)
                    self.say(console_line(step, config.run.steps, values, left))
                self._finish()
            except Stopped:
                self._stop()
        if writer:
            writer.close()

    def step(self, step: int) -> dict[str, float]:
        """Rollout, reward, update, refit; returns the step's metrics, equal on all ranks."""
        config, meter = self.config, Meter()
        every = config.draft.train_every
        train_draft = self.draft_spec is not None and every > 0 and step % every == 0

        self.before = self._states()
        self.interrupt.check()
        drawn, made = self.order.next(config.rollout.problems_per_step), []  # by every rank
        problems = drawn[self.mesh.rank :: self.mesh.world_size]
        reseed(config.run.seed, step, self.mesh.rank, "rollout")
        with self._phase(meter, "rollout"), self.interrupt.abandonable():
            requests = self._requests(drawn, config.rollout.samples_per_problem)
            made = self.fleet.generate(requests, sampling_of(config))
        with self._phase(meter, "wait"):
            self.interrupt.check()
            restarted = 0
            if self.fleet.any_died(step):
                with self._phase(meter, "restart"):
                    refit_all = partial(self._refit, self.policy, self.draft)
                    made, restarted = self.fleet.recover(step, refit_all, self.interrupt)
            everything = self.fleet.exchange(made)
        meter.total("rollout/engine_restarts", restarted)
        mine = {p.id for p in problems}
        rollouts = [r for r in everything if r.problem_id in mine]
        with self._phase(meter, "learn"):
            self.fleet.learn(step, everything)
        with self._phase(meter, "reward"):
            try:
                self._score(problems, rollouts)
            except RewardFailed as error:
                raise GuardStop(f"step {step}: {error}; {self._keep(step, rollouts)}") from error
            group_advantages(rollouts, config.rl)
            meter.total("reward/failures", sum(self.scorer.failures.values()))
            self.scorer.failures.clear()
        speculator = self.engine.speculator
        rollout_metrics(rollouts, meter, longest_draft(config) if speculator else 0)
        if speculator:
            speculation_metrics(speculator.take_tally(), speculator.window_bytes, meter)

        self.engine.sleep()
        try:
            self.learner.reinforce(rollouts, meter, train_draft, self.interrupt.check)
        except NonFinite as error:
            raise GuardStop(f"step {step}: {error}; {self._keep(step, rollouts)}") from error
        self.engine.wake()

        self.policy_version = step
        self.draft_version = step if train_draft else self.draft_version
        with self._phase(meter, "refit"):  # also of a draft that stands still: engines lose it in their sleep
            self._refit(self.policy, self.draft)
        self.done = step
        meter.maximum("perf/memory_gb", peak_memory_gb(self.mesh.device))
        values = meter.reduce(self.mesh)
        if train_draft:
            values["draft/tau_simulated"] = simulated_tau(values)
        trained = values["perf/train_policy_s"] + values["perf/train_draft_s"]
        self.scores = {"reward": values["reward/mean"], "tau": values.get("rollout/tau")}
        generated = values["perf/rollout_s"] + values.get("perf/restart_s", 0.0)
        values["perf/rollout_tokens_per_s"] = values["rollout/tokens"] / generated
        values["perf/train_tokens_per_s"] = values.pop("rollout/trained_tokens") / trained
        return values

    def say(self, text: str) -> None:
        """Print on the main rank."""
        if self.mesh.is_main:
            print(text, flush=True)

    # Set-up

    def _keep_problems(self, ids: Container[str]) -> None:
        self.problems = [p for p in self.problems if p.id in ids]
        self.held_out = [p for p in self.held_out if p.id in ids]

    def _build_models(self) -> None:
        config = self.config
        self.policy = build_policy(config, self.mesh, self.base, self.spec)
        self.draft = None
        if self.draft_spec:
            text = Counter(token for prompt in self.prompts.values() for token in prompt)
            for problem in self.problems:
                text.update(self.tokenizer.encode(problem.answer or "", add_special_tokens=False))
            self.draft = build_draft(config, self.mesh, self.draft_spec, text, special_ids(self.tokenizer))

    def _reinforce_learner(self, start: Path) -> Learner:
        config = self.config
        updates = config.run.steps * config.rl.minibatches
        draft_updates = updates // config.draft.train_every if config.draft.train_every else 0
        reference = None
        if config.rl.kl_coef:
            reference = build_policy(config, self.mesh, start, self.spec).eval().requires_grad_(False)
        return self._learner(config.optim, updates, draft_updates, reference)

    def _learner(
        self, policy: Optim, updates: int, draft_updates: int, reference: Policy | None = None
    ) -> Learner:
        config, draft = self.config, None
        if self.draft:
            trainer = draft_trainer(config.draft, self.draft)
            optimizer = ModelOptimizer("draft", self.draft, config.draft.optim, draft_updates)
            draft = DraftLearner(trainer, optimizer)
        sum_over_stages = self.mesh.sum_over_pp_ if self.mesh.pp_size > 1 else None
        optimizer = ModelOptimizer("policy", self.policy, policy, updates, sum_over_stages)
        return build_learner(config, self.mesh, self.policy, optimizer, draft, reference)

    def _warm_up(self) -> tuple[Path, Path | None]:
        """Teach the answer format, or load what an equal earlier run taught.

        Returns the folders the engine starts from: policy and draft.
        """
        config = self.config
        # Whatever of the draft's options a warm-up does not look at must not make it run again.
        options = dataclasses.replace(config.draft, train_every=1)
        problem_files = data_files(config.data) if config.data.path else []
        files = contents(self.base, *problem_files, config.draft.init)
        key = fingerprint(config.model, options, config.data, config.warmup, config.run.seed, files)
        # The main rank's: copies of a checkpoint on several nodes have different times.
        cached = cache_folder(config) / f"start-{self.mesh.from_main(key)}"
        policy, draft = cached / "policy", cached / "draft"
        if not config.warmup.steps:
            if self.draft:
                self._remove_folder(draft)
                export_draft(self.draft, draft, self.mesh)
            return self.base, draft if self.draft else None
        if all_ranks_see(policy, self.mesh):
            self.say(f"warm-up: taken from {cached}")
            load_hf(self.policy, policy)
            if self.draft:
                load_draft(self.draft, draft)
            return policy, draft if self.draft else None
        self._remove_folder(cached)  # what an interrupted warm-up left
        once = Optim(lr=config.warmup.lr, schedule="cosine", min_lr_ratio=0.1, warmup_steps=10)
        learner = self._learner(once, config.warmup.steps, config.warmup.draft_steps)
        warmup.train(config, self.mesh, learner, self.problems, self.tokenizer, self.say)
        if self.draft:
            export_draft(self.draft, draft, self.mesh)
        export_policy(self.policy, policy, self.base, self.mesh)  # last: its presence says that all is there
        return policy, draft if self.draft else None

    def _remove_folder(self, folder: Path) -> None:
        if self.mesh.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        self.mesh.barrier()

    # Checkpoints

    def _components(self) -> dict[str, Component]:
        return {"order": self.order, "guards": self.guards, "fleet": self.fleet}

    def _states(self) -> dict[str, Any]:
        return {name: component.state_dict() for name, component in self._components().items()}

    def _save(self, states: dict[str, Any]) -> None:
        """A checkpoint of the steps done, unless it is there; `states` are the components' after them."""
        if self.config.checkpoint.every and self.done > self.saved_step:
            facts = {
                "step": self.done,
                "policy_version": self.policy_version,
                "draft_version": self.draft_version,
                "scores": self.scores,
            }
            self.checkpoints.save(facts, self.learner.optimizers, states)
            self.saved_step = self.done

    def _keep(self, step: int, rollouts: list[Rollout]) -> str:
        """Write the rollouts of a step that failed, for replay; returns where they are."""
        folder = self.folder / "failed"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{step:06d}-rank-{self.mesh.rank:05d}.jsonl"
        write_rollouts(path, rollouts)
        return f"the step's rollouts are in {path}; the same command goes on after step {self.saved_step}"

    def _stop(self) -> None:
        """End before the last step, so that the same command goes on."""
        self._save(self.before)  # nothing of the dropped step was ever there: its problems come again
        self.checkpoints.wait()
        self.say(f"stopped; the same command goes on after step {self.saved_step}")

    def _resume(self) -> None:
        """Be where the checkpoint was saved."""
        assert self.saved
        restore(self.saved, self.mesh, self.learner.optimizers, self._components())
        self.done = self.saved_step = self.saved.step
        self.policy_version = self.saved.manifest["policy_version"]
        self.draft_version = self.saved.manifest["draft_version"]
        self._refit(self.policy, self.draft)
        if self.mesh.is_main:
            note_resumption(self.config, self.folder, self.done)
        self.say(f"resumed from {self.saved.folder}")

    # Parts of a step

    def _requests(self, problems: list[Problem], samples: int) -> list[Request]:
        return [Request(problem_id=p.id, prompt_tokens=self.prompts[p.id], samples=samples) for p in problems]

    def _generate_eval(self, problems: list[Problem], samples: int) -> list[Rollout]:
        """Answers that teach the drafters nothing."""
        speculator = self.engine.speculator
        with speculator.frozen_stats() if speculator else nullcontext():
            return self.engine.generate(self._requests(problems, samples), sampling_of(self.config))

    def _refit(
        self, policy: Policy | None, draft: HasWeights | None, draft_version: int | None = None
    ) -> None:
        versions = {"policy_version": self.policy_version, "draft_version": self.draft_version}
        if draft_version is not None:
            versions["draft_version"] = draft_version
        refit(self.engine, policy, draft, **versions, dtype=compute_dtype(self.config))

    def _score(self, problems: list[Problem], rollouts: list[Rollout]) -> None:
        """Score rollouts. A signal, or a function that fails on any rank, ends it on every rank. Collective."""
        failed = None
        with self.interrupt.abandonable():
            try:
                score(self.scorer, self.tokenizer, problems, rollouts)
            except RewardFailed as error:
                failed = error
        self.interrupt.check()
        if self.mesh.max_over_world(torch.tensor([float(failed is not None)])).item():
            raise failed or RewardFailed("a reward function failed on another rank")

    def _tau(self, rollouts: list[Rollout]) -> SpecStats:
        return SpecStats.total((r.spec for r in rollouts if r.spec), longest_draft(self.config))

    def _evaluate(self) -> dict[str, float]:
        """Reward and tau on the held-out problems; tau of the frozen draft on the same policy and problems."""
        meter = Meter()
        problems = self.held_out[self.mesh.rank :: self.mesh.world_size]
        reseed(self.config.run.seed, self.done, self.mesh.rank, "eval")
        samples = self.config.eval.samples_per_problem
        with self._phase(meter, "eval"):
            rollouts = self._generate_eval(problems, samples)
            try:
                self._score(problems, rollouts)
            except Stopped:  # the step before is whole: its metrics and its checkpoint come first
                return {}
            except RewardFailed as error:
                kept = self._keep(self.done, rollouts)
                raise GuardStop(f"evaluation after step {self.done}: {error}; {kept}") from error
            meter.mean("eval/reward", sum(r.reward or 0.0 for r in rollouts), len(rollouts))
            if self.engine.speculator:
                add_tau(meter, "eval/tau", self._tau(rollouts))
            if self.frozen_draft:
                self._refit(None, self.frozen_draft, draft_version=0)
                add_tau(meter, "eval/tau_frozen", self._tau(self._generate_eval(problems, samples)))
            # Also without a frozen draft: what evaluation left in the prefix cache must not meet the next step,
            # or a run that is resumed there would differ.
            self._refit(None, self.draft if self.frozen_draft else None)
        return meter.reduce(self.mesh)

    @contextmanager
    def _phase(self, meter: Meter, name: str) -> Generator[None]:
        """Time a phase; the slowest rank's time counts, as it is what the step takes."""
        started = time.perf_counter()
        yield
        meter.maximum(f"perf/{name}_s", time.perf_counter() - started)

    # The end

    def _finish(self) -> None:
        """Export and plots."""
        config = self.config
        self._save(self._states())
        self.checkpoints.wait()
        served = compute_dtype(config)
        self._remove_folder(
            self.folder / "policy"
        )  # a session that was stopped here, or asked for fewer steps
        self._remove_folder(self.folder / "draft")
        export_policy(self.policy, self.folder / "policy", self.base, self.mesh, served)
        if self.draft:
            export_draft(self.draft, self.folder / "draft", self.mesh)
        if self.mesh.is_main:
            note(self.folder, finished=time.strftime("%Y-%m-%d %H:%M:%S %z"))
            draft_tokens = config.rollout.num_draft_tokens if self.draft else 0
            self.say(farewell(self.folder, draw_plots(self.folder), draft_tokens))

    def close(self) -> None:
        """Free the engine, the workers and the process group."""
        self.checkpoints.close()
        self.engine.close()
        self.scorer.close()
        self.mesh.close()
