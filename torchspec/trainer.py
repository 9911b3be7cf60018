"""The training run: rollouts, rewards, one update of policy and draft, refit; step after step."""

from __future__ import annotations

import time

from torchspec import build
from torchspec.checkpoint.checkpoint import Checkpoints, Saved, newest
from torchspec.checkpoint.lock import own_run
from torchspec.checkpoint.run_folder import create_run_folder, dependencies, find_run, note_resumption
from torchspec.config.schema import Config
from torchspec.data.sampler import ProblemOrder
from torchspec.data.tokenizer import load_tokenizer, special_ids
from torchspec.distributed.fsdp import compute_dtype
from torchspec.distributed.interrupt import Interrupt
from torchspec.distributed.mesh import Mesh, check_world
from torchspec.drafts.build import build_draft, check_draft, draft_spec
from torchspec.errors import GuardStop, NonFinite, RewardFailed, Stopped
from torchspec.metrics.console import console_line
from torchspec.metrics.meter import Meter
from torchspec.metrics.rollout_metrics import derive_metrics, rollout_metrics, speculation_metrics
from torchspec.metrics.stopwatch import peak_memory_gb
from torchspec.metrics.writer import MetricWriter
from torchspec.models.spec import PolicySpec
from torchspec.records import Problem, Rollout
from torchspec.rewards.advantages import group_advantages
from torchspec.rollout.engine import sampling_of
from torchspec.rollout.files import write_rollouts
from torchspec.rollout.fleet import Fleet
from torchspec.rollout.registry import build_engine, check_engine
from torchspec.rollout.seeding import reseed
from torchspec.speculation.lengths import LengthStats
from torchspec.training import warmup
from torchspec.training.evaluate import Evaluation
from torchspec.training.finish import finish
from torchspec.training.guards import Guards
from torchspec.training.progress import Progress
from torchspec.training.refit import ServedWeights
from torchspec.training.task import Task


class Trainer:
    """All objects of a run, on one rank.

    The constructor does everything that can fail on the user's input, cheapest first: problems, rewards,
    tokenizer and prompt lengths before weights, weights before the engine.

    Raises:
        ConfigError: what the config asks for cannot be done.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task = Task(config)
        self.mesh = Mesh(config.parallel)
        check_world(config, self.mesh, len(self.task.problems), len(self.task.held_out))
        self.lock = own_run(config, self.mesh)
        self.interrupt = Interrupt(self.mesh)
        self.base = build.base_folder(config, self.mesh)
        spec = PolicySpec.from_hf(self.base, config.model.max_len)
        self._check(spec)
        self.depends = dependencies(self.task.prompts, config.reward.functions)
        self.folder, resumes = find_run(config, self.depends)
        found = newest(self.folder / "checkpoints") if resumes and self.mesh.is_main else None
        saved = self.mesh.from_main(found)  # all ranks have looked before one makes the folder
        self._build(spec)
        self._begin(saved)

    def fit(self) -> None:
        """Run the steps that are left, then export and draw plots."""
        config, progress = self.config, self.progress
        writer = MetricWriter(self.folder, progress.done) if self.mesh.is_main else None
        if config.eval.every and not progress.done:
            values = self.evaluation.run(0)
            if writer:
                writer.write(0, values)
        started, first = time.perf_counter(), progress.done + 1
        with self.interrupt:  # to the end of `stop`: a second signal must not break the last checkpoint
            try:
                for step in range(first, config.run.steps + 1):
                    values = self.step(step)
                    if self.evaluation.is_due(step):
                        values |= self.evaluation.run(step)
                    if writer:
                        writer.write(step, values)
                    self.guards.check(step, values)
                    progress.save_if_due()
                    left = (time.perf_counter() - started) / (step - first + 1) * (config.run.steps - step)
                    self.say(console_line(step, config.run.steps, values, left))
                progress.finish()
                self.say(finish(config, self.mesh, self.learner, self.base, self.folder))
            except Stopped:
                progress.stop()
                self.say(f"stopped; the same command goes on after step {progress.saved}")
        if writer:
            writer.close()

    def step(self, step: int) -> dict[str, float]:
        """Roll out, reward, update, refit; return the step's metrics, equal on all ranks."""
        meter = Meter()
        self.progress.begin_step()
        self.interrupt.check()
        batch_problems = self.order.next(self.config.rollout.problems_per_step)  # equal on all ranks
        all_rollouts = self._generate(step, batch_problems, meter)
        local_rollouts = self._reward(step, batch_problems, all_rollouts, meter)
        train_draft = self._update(step, local_rollouts, meter)
        with meter.phase("refit"):
            self.weights.send()
        meter.maximum("perf/memory_gb", peak_memory_gb(self.mesh.device))
        values = meter.reduce(self.mesh)
        derive_metrics(values, train_draft)
        self.progress.end_step(step, values)
        return values

    def say(self, text: str) -> None:
        """Print on the main rank."""
        if self.mesh.is_main:
            print(text, flush=True)

    def close(self) -> None:
        """Free the engine, the workers and the process group."""
        self.progress.close()
        self.engine.close()
        self.task.close()
        self.mesh.close()

    # Set-up

    def _check(self, spec: PolicySpec) -> None:
        """Refuse what does not fit, before weights load."""
        config = self.config
        check_engine(config, self.mesh.device.type, spec)
        tokenizer = load_tokenizer(self.base, spec)
        self.task.tokenize(tokenizer, config.model.max_len - config.rollout.max_new_tokens)
        check_world(
            config, self.mesh, len(self.task.problems), len(self.task.held_out)
        )  # some may be left out
        if config.draft.enabled:
            draft_spec(config, spec)
        check_draft(config, self.base)
        warmup.check(config, self.task.problems, tokenizer)

    def _build(self, spec: PolicySpec) -> None:
        """Load the models, warm them up, and start the engine on the result."""
        config, mesh, draft = self.config, self.mesh, None
        policy = build.build_policy(config, mesh, self.base, spec)
        if config.draft.enabled:
            shape, keep = draft_spec(config, spec), special_ids(self.task.tokenizer)
            draft = build_draft(config, mesh, shape, self.task.token_counts(), keep)
        learner = build.warmup_learner(config, mesh, policy, draft)
        start, draft_start = warmup.warm_up(config, mesh, learner, self.task, self.base, self.say)
        self.learner = build.rl_learner(config, mesh, policy, draft, start)
        lengths = LengthStats(default=config.rollout.max_new_tokens)
        steps_per_epoch = -(-len(self.task.problems) // config.rollout.problems_per_step)
        self.engine = build_engine(
            config,
            policy_folder=start,
            draft_folder=draft_start,
            seed=config.run.seed + mesh.rank,
            device_type=mesh.device.type,
            lengths=lengths,
            window=max(16, 2 * steps_per_epoch),
        )
        self.fleet = Fleet(mesh, self.engine, lengths, config.rollout.tail_weight)
        self.weights = ServedWeights(self.engine, policy, draft, compute_dtype(config))
        self.evaluation = Evaluation(
            config, mesh, self.engine, self.task, self.weights, self.interrupt, self._keep
        )

    def _begin(self, saved: Saved | None) -> None:
        """Begin a new run folder, or go on from a checkpoint."""
        config, mesh = self.config, self.mesh
        self.order = ProblemOrder(self.task.problems, config.run.seed)
        self.guards = Guards(config)
        if self.lock and not saved:  # nothing of an earlier run is removed before this one can start
            self.lock.check()
            create_run_folder(config, self.folder, self.depends)
            self.engine.save_costs(self.folder / "cost.json")
        mesh.barrier()
        checkpoints = Checkpoints(self.folder / "checkpoints", mesh, config.checkpoint)
        components = {"order": self.order, "guards": self.guards, "fleet": self.fleet}
        optimizers, every = self.learner.optimizers, config.checkpoint.every
        self.progress = Progress(checkpoints, every, optimizers, components, self.weights, self.lock)
        if saved:
            self.progress.resume(saved, mesh)
            if mesh.is_main:
                note_resumption(config, self.folder, saved.step, self.depends)
            self.say(f"resumed from {saved.folder}")

    # Parts of a step

    def _generate(self, step: int, problems: list[Problem], meter: Meter) -> list[Rollout]:
        """Return all ranks' rollouts; an engine that died is built again once."""
        config, rollouts, restarted = self.config, [], 0
        reseed(config.run.seed, step, self.mesh.rank, "rollout")
        with meter.phase("rollout"), self.interrupt.abandonable():
            requests = self.task.requests(problems, config.rollout.samples_per_problem)
            rollouts = self.fleet.generate(requests, sampling_of(config))
        with meter.phase("wait"):
            self.interrupt.check()
            if self.fleet.any_died(step):
                with meter.phase("restart"):
                    rollouts, restarted = self.fleet.recover(step, self.weights.send, self.interrupt)
            all_rollouts = self.fleet.exchange(rollouts)
        meter.total("rollout/engine_restarts", restarted)
        with meter.phase("learn"):
            self.fleet.learn(step, all_rollouts)
        return all_rollouts

    def _reward(
        self, step: int, problems: list[Problem], rollouts: list[Rollout], meter: Meter
    ) -> list[Rollout]:
        """Return the scored rollouts of this rank's share of the problems."""
        problems = problems[self.mesh.rank :: self.mesh.world_size]
        ids = {p.id for p in problems}
        rollouts = [r for r in rollouts if r.problem_id in ids]
        with meter.phase("reward"):
            try:
                self.task.score(problems, rollouts, self.mesh, self.interrupt)
            except RewardFailed as error:
                raise GuardStop(f"step {step}: {error}; {self._keep(step, rollouts)}") from error
            group_advantages(rollouts, self.config.rl)
            meter.total("reward/failures", self.task.take_failures())
        rollout_metrics(rollouts, meter, self.engine.longest_draft)
        if stats := self.engine.drain_stats():
            speculation_metrics(stats, meter)
        return rollouts

    def _update(self, step: int, rollouts: list[Rollout], meter: Meter) -> bool:
        """Train on this rank's rollouts while the engine sleeps; return whether the draft was trained."""
        every = self.config.draft.train_every
        train_draft = self.learner.draft is not None and every > 0 and step % every == 0
        self.engine.sleep()
        try:
            self.learner.reinforce(rollouts, meter, train_draft, self.interrupt.check)
        except NonFinite as error:
            raise GuardStop(f"step {step}: {error}; {self._keep(step, rollouts)}") from error
        self.engine.wake()
        self.weights.policy_version = step
        if train_draft:
            self.weights.draft_version = step
        return train_draft

    def _keep(self, step: int, rollouts: list[Rollout]) -> str:
        """Write the rollouts of a step that failed, for replay; return where they are."""
        path = self.folder / "failed" / f"step-{step:06d}-rank-{self.mesh.rank:05d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_rollouts(path, rollouts)
        return f"the step's rollouts are in {path}; the same command goes on after step {self.progress.saved}"
