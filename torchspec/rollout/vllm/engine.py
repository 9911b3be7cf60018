"""vLLM as the rollout engine: one engine inside each data-parallel rank's process.

vLLM is imported when an engine is built, never before, because part of its environment is read at import.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchspec.config.schema import Config, longest_draft
from torchspec.errors import ConfigError
from torchspec.models.spec import read_json
from torchspec.records import Rollout
from torchspec.rollout.engine import Counters, Request, Sampling
from torchspec.rollout.vllm import cpu_patches as vllm_cpu
from torchspec.rollout.vllm.adapter import CalibrationRun, NoProposals, SpecDecodeAdapter
from torchspec.rollout.vllm.requests import Sample, run, spec_stats
from torchspec.rollout.vllm.setup import (
    CPU_KV_CACHE_GB,
    Positions,
    built_alone,
    check_draft,
    check_version,
    own_draft_head,
    prepare_environment,
    process_kept,
    world_kept,
)
from torchspec.speculation.budget import MEASURED, CostTable, given_costs
from torchspec.speculation.calibration import measure
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.speculator import Speculator
from torchspec.speculation.stats import SpeculationStats

if TYPE_CHECKING:
    from vllm import RequestOutput

    from torchspec.rollout.engine import NamedWeights


class VllmEngine:
    """A vLLM engine that speculates as rollout.drafter says; implements `torchspec.rollout.engine.Engine`.

    Under a torch.distributed world of several ranks it uses vLLM's external launcher, so that our ranks are
    vLLM's ranks; each rank's engine then runs its own load. Rejection sampling is vLLM's strict one: what is
    sampled follows the policy alone.

    Building an engine reseeds the global generators of Python, numpy and torch with `seed`; the engine draws
    from torch's, so give every rank another seed.

    An engine lives until `close` or the end of the process; one that is merely dropped takes torch.distributed
    down with it.

    Args:
        config: `model`, `rollout`, `suffix` and `budget` are read.
        policy_folder: HF folder of the policy (config, safetensors, tokenizer).
        draft_folder: HF folder of an EAGLE-3 draft; with None the drafter "model" means no speculation.
        seed: of everything that this engine samples.
        device_type: "cpu" or "cuda".
        lengths: what is known of responses' lengths; the owner lets it observe.
        window: iterations that the suffix drafter remembers, where suffix.window is 0.

    Raises:
        ConfigError: vLLM is absent or of an untested version, a folder cannot be used, or vLLM refuses the
            configuration.
        RuntimeError: the engine came up without the draft it was given.
    """

    def __init__(
        self,
        config: Config,
        policy_folder: str | Path,
        draft_folder: str | Path | None,
        *,
        seed: int,
        device_type: str,
        lengths: LengthStats | None = None,
        window: int = 16,
    ) -> None:
        check_version(device_type)
        policy_config = read_json(Path(policy_folder) / "config.json", "policy")
        if draft_folder is not None and config.rollout.drafter == "suffix":
            raise ConfigError("rollout.drafter = 'suffix' has no use for a draft checkpoint; try 'hybrid'")
        if draft_folder is not None:
            check_draft(Path(draft_folder), policy_config)
        elif config.rollout.drafter == "hybrid":
            raise ConfigError("rollout.drafter = 'hybrid' needs a draft checkpoint, and none was given")
        self.lengths = lengths or LengthStats(default=config.rollout.max_new_tokens)
        given = given_costs(config.budget)
        self.counters = Counters()
        self._max_len = config.model.max_len
        self._on_cpu = device_type == "cpu"
        self._sleeps = device_type == "cuda" and config.rollout.sleep
        self._is_guest = dist.is_initialized()
        limit = policy_config.get("max_position_embeddings", self._max_len)
        if self._max_len > limit:
            raise ConfigError(f"model.max_len = {self._max_len} is beyond the policy's {limit} positions")

        prepare_environment(device_type)
        if self._on_cpu:
            vllm_cpu.mend()
        self._origin = config, Path(policy_folder), draft_folder, seed
        self._requests = 0
        self._samples: list[Sample] = []
        self.cost: CostTable | None = None
        self.speculator: Speculator | None = None
        self._start()
        if self._hook:
            if config.budget.rule in MEASURED:
                self.cost = given or self._calibrate(config, policy_config["vocab_size"])
            self.speculate(Speculator(config, self.lengths, self.cost, window))

    @property
    def longest_draft(self) -> int:
        return longest_draft(self._origin[0]) if self.speculator else 0

    def drain_stats(self) -> SpeculationStats | None:
        if self.speculator is None:
            return None
        tally = self.speculator.take_tally()
        tally.window_bytes = self.speculator.window_bytes
        return tally

    def frozen_stats(self) -> AbstractContextManager[None]:
        return self.speculator.frozen_stats() if self.speculator else nullcontext()

    def save_costs(self, path: Path) -> None:
        if self.cost:
            self.cost.save(path)

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`. Each sample is a vLLM request; extra_args carries its problem's id."""
        samples = [(request, index) for request in requests for index in range(request.samples)]
        self._samples = []
        for position, (request, index) in enumerate(samples):
            seed = None if sampling.seed is None else sampling.seed + position
            self._samples.append(Sample(request, index, self._parameters(request, seed, sampling)))
        return self.resume()

    def resume(self) -> list[Rollout]:
        left = [sample for sample in self._samples if sample.rollout is None]
        if self.speculator:
            self.speculator.set_queue_depth(len(left))
        start = time.perf_counter(), time.thread_time()
        try:
            self._run(left, self._keep)
        finally:
            self.counters.seconds += time.perf_counter() - start[0]
            self.counters.thread_seconds += time.thread_time() - start[1]
        if self._hook:
            self._hook.forget()
        rollouts = [sample.rollout for sample in self._samples if sample.rollout]
        assert len(rollouts) == len(self._samples), "vLLM left requests unanswered"
        return rollouts

    def restart(self) -> None:
        if self._hook:
            self._hook.forget({sample.id for sample in self._samples if sample.rollout is None})
            self._hook = None  # it holds the dead engine's runner
        size = self._cache_bytes()  # what is free by now says nothing of what the trainer will need
        # vLLM's shutdown drops the policy, not the draft, which would outlive the memory pool that it lies in.
        self._ask(_drop_draft)
        self.close()
        with built_alone():
            # At the first start this share of the GPU had to be free; by now the optimizers have theirs.
            self._start(kv_cache_memory_bytes=size, gpu_memory_utilization=0.01)
        if self._hook:
            self._hook.speculator = self.speculator

    def speculate(self, speculator: Speculator | None) -> None:
        """Let `speculator` draft from now on; None: nobody, at no cost.

        It may use the draft model only if this engine has one.
        """
        if self._hook is None:
            raise RuntimeError("this engine was built without speculation")
        self.speculator = self._hook.speculator = speculator
        self._drop_prefixes()  # the draft's keys and values are not there for what was generated without it

    def shared_names(self) -> frozenset[str]:
        return self._shared or frozenset()

    def update(
        self,
        policy: NamedWeights | None,
        draft: NamedWeights | None,
        *,
        policy_version: int,
        draft_version: int,
    ) -> None:
        if draft is not None and self._shared is None:
            raise RuntimeError("draft weights for an engine without a draft")
        if policy is not None:
            self._llm.start_weight_update()
            self._load(policy)
        if draft is not None:
            self._llm.start_draft_weight_update()
            self._load(self._refusing_shared(draft))
        # Keys and values of cached prefixes belong to the old weights; vLLM does not drop them by itself.
        self._drop_prefixes()
        self.policy_version = policy_version
        self.draft_version = draft_version

    def sleep(self) -> None:
        """Level 1: weights move to host memory (level 2 would drop the draft's), the KV cache is freed."""
        if self._sleeps:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        if self._sleeps:
            self._llm.wake_up()

    def learn(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        if self.speculator:
            self.speculator.learn(iteration, rollouts)
            self._drop_prefixes()  # it may use the draft model from now on, or no longer

    def state_dict(self) -> dict[str, Any]:
        return self.speculator.state_dict() if self.speculator else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.speculator:
            self.speculator.load_state_dict(state)

    def close(self) -> None:
        with world_kept() if self._is_guest else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        if not self._on_cpu:
            torch.cuda.empty_cache()

    def _start(self, **given: Any) -> None:
        from vllm import LLM

        from torchspec.rollout.vllm import weight_transfer as weights

        arguments = self._arguments(*self._origin) | given
        with process_kept(), own_draft_head():
            try:
                self._llm = LLM(**arguments, weight_transfer_config={"backend": weights.BACKEND})
            except ValueError as error:  # the way vLLM refuses a configuration (also pydantic's)
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"vLLM refuses [rollout] or model.max_len of this config: {reason}"
                ) from error
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._shared = self._ask(_shared_names)
        draft_folder = self._origin[2]
        if draft_folder is not None and self._shared is None:
            self.close()
            raise RuntimeError(f"vLLM came up without a drafter, though it was given {draft_folder}")
        self._hook: SpecDecodeAdapter | None = None
        if "speculative_config" in arguments:
            self._hook = self._ask(lambda worker: SpecDecodeAdapter(worker.model_runner))
        self.policy_version = self.draft_version = 0

    def _arguments(
        self, config: Config, policy_folder: Path, draft_folder: str | Path | None, seed: int
    ) -> dict[str, Any]:
        rollout = config.rollout
        kv_cache_gb = rollout.kv_cache_gb or (CPU_KV_CACHE_GB if self._on_cpu else 0)
        in_world = dist.is_initialized() and dist.get_world_size() > 1
        arguments: dict[str, Any] = {
            "model": str(policy_folder),
            "dtype": config.model.dtype,
            "seed": seed,
            "max_num_seqs": rollout.max_num_seqs,
            "max_model_len": self._max_len,
            "kv_cache_memory_bytes": int(kv_cache_gb * 2**30) or None,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enforce_eager": rollout.enforce_eager or self._on_cpu,
            "enable_sleep_mode": self._sleeps,
            "distributed_executor_backend": "external_launcher" if in_world else "uni",
            "async_scheduling": False,
            "logprobs_mode": "processed_logprobs",
            "use_tqdm_on_load": False,
        }
        if draft_folder is None and rollout.drafter == "model":
            return arguments
        # vLLM drafts for nobody while a sequence, with the K drafts it verifies and the K to come, would be
        # longer than max_model_len. No token ever sits in this headroom.
        longest = self._max_len + 2 * longest_draft(config)
        return arguments | {
            "max_model_len": longest,
            "hf_overrides": Positions(longest),
            "speculative_config": self._speculation(draft_folder, config),
            "per_request_spec_decode_metrics": "detailed",
        }

    def _speculation(self, draft_folder: str | Path | None, config: Config) -> dict[str, Any]:
        longest = longest_draft(config)
        # Without a schedule vLLM gives a request that joins with one uncached token K placeholder drafts, which
        # have no probabilities.
        schedule = [(1, config.rollout.max_num_seqs, longest)]
        common = {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": schedule}
        if config.rollout.drafter == "suffix":
            return common | {"method": "custom_class", "model": f"{NoProposals.__module__}.NoProposals"}
        # Sampled drafts, with their probabilities kept for the rejection test, are accepted far more often
        # at temperature 1 than greedy ones.
        return common | {
            "method": "eagle3",
            "model": str(draft_folder),
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }

    def _run(self, samples: list[Sample], take: Callable[[Sample, RequestOutput], None]) -> None:
        # On CPU compiling vLLM's small sampling helpers costs 14 s at their first use and gains nothing.
        with torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext():
            run(self._llm, samples, take)

    def _calibrate(self, config: Config, vocabulary: int) -> CostTable:
        """Measure a step's time by tokens and batch, with garbage for drafts."""
        from vllm import SamplingParams

        hook = self._hook
        assert hook is not None

        def run(schedule: list[int], batch: int) -> CalibrationRun:
            model_tokens = config.rollout.num_draft_tokens if self._shared is not None else 0
            hook.forced = CalibrationRun(schedule, vocabulary, model_tokens, batch)
            tokens = min(2 * len(schedule) + 2, self._max_len - 4)
            limit = SamplingParams(
                max_tokens=tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
            )
            requests = [
                Request(problem_id="", prompt_tokens=[2 + i % (vocabulary - 2)] * 4) for i in range(batch)
            ]
            self._run([Sample(request, 0, limit) for request in requests], lambda *_: None)
            forced, hook.forced = hook.forced, None
            return forced

        table = measure(run, config.rollout.max_num_seqs, longest_draft(config))
        self._drop_prefixes()
        return table

    def _cache_bytes(self) -> int:
        client: Any = self._llm.llm_engine.engine_core
        return client.engine_core.available_gpu_memory_for_kv_cache

    def _drop_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")

    def _parameters(self, request: Request, seed: int | None, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        self._requests += 1  # vLLM's own ids end in random letters, others on every rank
        room = self._max_len - len(request.prompt_tokens)
        if room <= 0:
            raise ConfigError(
                f"problem {request.problem_id}: its prompt of {len(request.prompt_tokens)} tokens leaves no "
                f"room in model.max_len = {self._max_len}; raise model.max_len or drop the problem"
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_new_tokens, room),
            seed=seed,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            extra_args={"problem_id": request.problem_id, "id": f"{self._requests:010}"},
        )

    def _keep(self, sample: Sample, output: RequestOutput) -> None:
        completion: Any = output.outputs[0]  # its logprobs are flat, and it has finished
        request = sample.request
        self.counters.samples += 1
        self.counters.prompt_tokens += len(request.prompt_tokens)
        self.counters.cached_tokens += output.num_cached_tokens or 0
        self.counters.tokens += len(completion.token_ids)
        sample.rollout = Rollout(
            problem_id=request.problem_id,
            sample=sample.index,
            prompt_tokens=request.prompt_tokens,
            tokens=sample.tokens + list(completion.token_ids),
            logprobs=sample.logprobs + list(completion.logprobs.logprobs),
            finish=completion.finish_reason,
            policy_version=self.policy_version,
            draft_version=self.draft_version,
            spec=spec_stats(completion.spec_decode_metrics),
        )

    def _load(self, weights: NamedWeights) -> None:
        self._llm.update_weights({"update_info": {"weights": weights}})
        self._llm.finish_weight_update()
        self._ask(_compare)

    def _refusing_shared(self, draft: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in draft:
            if name in self.shared_names():
                raise ValueError(
                    f"draft weight {name} is the policy's own here; sending it changes the policy"
                )
            yield name, tensor

    def _ask(self, question: Any) -> Any:
        return self._llm.collective_rpc(question)[0]


def _compare(worker: Any) -> int:
    """Runs in the worker: raises unless the engine holds the weights that were sent."""
    return worker.weight_transfer_engine.compare()


def _drop_draft(worker: Any) -> None:
    worker.model_runner.drafter = None
    gc.collect()


def _shared_names(worker: Any) -> frozenset[str] | None:
    """Runs in the worker: names of draft modules that are the policy's; None without a draft."""
    policy, draft = worker.model_runner.get_model(), worker.get_draft_model()
    if draft is None:
        return None
    names = {"embed_tokens.weight"} if draft.model.embed_tokens is policy.model.embed_tokens else set()
    return frozenset(names | ({"lm_head.weight"} if draft.lm_head is policy.lm_head else set()))
