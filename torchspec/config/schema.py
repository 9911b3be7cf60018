"""The configuration: sections and keys, with defaults, bounds, and what a resumed run may change.

`load` fills these from a TOML file and the command line. `docs/config.md` is made from this file (`make docs`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torchspec.config.keys import key
from torchspec.records import SamplingLaw

MAY_CHANGE = {"may_change": True}
"""Of a section: a resumed run may change all of its keys."""


@dataclass(kw_only=True, slots=True)
class Run:
    name: str = "run"
    """Name of the run; its files go to `dir/name`."""
    dir: str = key("runs", may_change=True)
    """Folder that holds all runs."""
    seed: int = 0
    """Seeds the problems' order, the sampling engines and every random initialisation."""
    steps: int = key(100, low=1)
    """RL steps: rollout, optimizer updates, refit."""
    overwrite: bool = key(False, may_change=True)
    """Replace an earlier run of this name that is finished, or was of another config; otherwise that is an error.
    A run of this config that was stopped goes on, whatever this says."""


@dataclass(kw_only=True, slots=True)
class TinyModel:
    """A randomly initialised policy with a character tokenizer, for `model.source = "tiny"`."""

    dim: int = key(192, low=1)
    """Width of the hidden states."""
    layers: int = key(4, low=1)
    """Number of layers."""
    heads: int = key(6, low=1)
    """Query heads."""
    kv_heads: int = key(2, low=1)
    """Key/value heads; `heads` is a multiple of it."""
    head_dim: int = key(32, low=2)
    """Width of a head; even."""
    ffn_dim: int = key(512, low=1)
    """Hidden width of the feed-forward."""
    tied: bool = True
    """Share the embedding and the head."""


@dataclass(kw_only=True, slots=True)
class Model:
    source: str = "tiny"
    """A folder with HF safetensors, config and tokenizer (Qwen3 or Llama 3), a hub id, or "tiny"."""
    max_len: int = key(512, low=2)
    """Longest prompt plus response, in tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of training and rollouts; master weights and reductions are always float32."""
    tiny: TinyModel = field(default_factory=TinyModel)


@dataclass(kw_only=True, slots=True)
class Optim:
    lr: float = key(1e-6, low=0)
    """Highest learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after its warm-up, over run.steps."""
    warmup_steps: int = key(0, low=0)
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = key(0.0, low=0, high=1)
    """The schedule ends at lr * min_lr_ratio."""
    weight_decay: float = key(0.0, low=0)
    """AdamW: decoupled weight decay."""
    beta1: float = key(0.9, low=0, below=1)
    """AdamW: decay of the gradient's mean."""
    beta2: float = key(0.95, low=0, below=1)
    """AdamW: decay of the squared gradient's mean."""
    eps: float = key(1e-8, above=0)
    """AdamW: added to the denominator."""
    clip: float = key(1.0, low=0, why="0 turns clipping off")
    """Largest gradient norm of this model (each model has its own); 0 turns clipping off."""


@dataclass(kw_only=True, slots=True)
class Draft:
    enabled: bool = True
    """Speculate with a co-trained draft; false trains the policy alone, without speculation."""
    arch: str = "eagle3"
    """Architecture of the draft, by its name in the registry (drafts/registry.py)."""
    init: str = "random"
    """ "random", or a folder with a draft of this architecture (HF or speculators layout), whose shape then counts:
    vocab_size, fc_norm, norm_output, aux_layers, heads, kv_heads and ffn_dim are for random drafts."""
    train_every: int = key(1, low=0)
    """Train the draft on every n-th step; 0 keeps it frozen."""
    ttt_steps: int = key(7, low=1)
    """K, the passes of training-time test."""
    pass_decay: float = key(0.8, above=0, high=1)
    """Pass d weighs pass_decay ** d in the loss, d counted from 0."""
    vocab_size: int = key(0, low=0)
    """Size of a reduced draft vocabulary (the most frequent tokens of the training text); 0: the policy's."""
    fc_norm: bool = True
    """EAGLE-3.1: a norm on each tap before they are projected. False with norm_output = false is EAGLE-3."""
    norm_output: bool = True
    """EAGLE-3.1: pass the normed hidden state on to the next pass."""
    aux_layers: list[int] = field(default_factory=list)
    """Ids of the three tapped layers, each the hidden state entering that layer; []: 2, L//2, L-3."""
    heads: int = key(0, low=0)
    """Query heads of the draft's layer; 0: the policy's."""
    kv_heads: int = key(0, low=0)
    """Key/value heads of the draft's layer; 0: the policy's."""
    ffn_dim: int = key(0, low=0)
    """Hidden width of the draft's feed-forward; 0: the policy's."""
    loss_rows: int = key(1024, low=1, may_change=True)
    """Rows of head and soft cross-entropy computed at a time; logits never exist for more."""
    row_block: int = key(0, low=0, may_change=True)
    """Rows that go through their K passes at a time, exactly; memory of the passes grows with it. 0: all."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-4))


@dataclass(kw_only=True, slots=True)
class Data:
    source: Literal["reasoning_gym", "jsonl", "parquet", "hf"] = "reasoning_gym"
    """Where problems come from: procedural, a local file, or a local Hugging Face data set folder."""
    task: str = "spell_backward"
    """reasoning_gym: name of the task."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: parameters of the task's generator."""
    path: str = ""
    """jsonl, parquet: a file, a folder of shards, or a glob; hf: the folder that save_to_disk wrote."""
    split: str = "train"
    """hf: the split, where the folder has several."""
    prompt_key: str = "prompt"
    """Field with the question: a string, or a list of chat messages. Nested fields are dotted: a.b."""
    answer_key: str = "answer"
    """Field with the reference answer."""
    answer_pattern: str = ""
    """Regular expression whose first group, at its last match, is the answer in that field; "": the whole field."""
    unreadable: Literal["error", "skip"] = "error"
    """Problems whose reference is missing, or the reward function cannot read: refuse them, or leave them out."""
    overlong: Literal["error", "skip"] = "error"
    """Problems whose prompt leaves no room for rollout.max_new_tokens: refuse them, or leave them out."""
    id_key: str = ""
    """Field with a stable problem id; "": the line's number."""
    system_prompt: str = ""
    """Put before every question as the system message."""
    size: int = key(1024, low=0)
    """Number of training problems (reasoning_gym generates them; files are cut to it; 0: all)."""
    eval_size: int = key(64, low=0)
    """Held-out problems: generated beyond the training ones, or taken from the end of a file."""


@dataclass(kw_only=True, slots=True)
class Reward:
    functions: list[str] = field(default_factory=lambda: ["reasoning_gym"])
    """Any of: exact, format, math_verify, reasoning_gym, or a dotted path to your function."""
    weights: list[float] = field(default_factory=list)
    """One weight per function; []: all 1."""
    answer_pattern: str = r"<answer>(.*?)</answer>"
    """Regular expression whose first group is the answer in a response; "": the whole response."""
    timeout_s: float = key(5.0, above=0)
    """Longest time a function may take for one response. Beyond it the response scores 0 in math_verify and
    reasoning_gym, and a function of yours has failed."""
    max_failures: int = key(0, low=0)
    """Failures of your functions in a step, on one rank, that only count as failure_score; one more stops the run.
    A function fails that raises, takes too long, ends its process or returns no finite number."""
    failure_score: float = 0.0
    """Score of a response that your function failed for."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    problems_per_step: int = key(16, low=1)
    """Problems a step, over all ranks."""
    samples_per_problem: int = key(8, low=2)
    """n, the responses in a group."""
    max_new_tokens: int = key(256, low=1)
    """Longest response, in tokens."""
    temperature: float = key(1.0, above=0, why="greedy samples cannot be trained on")
    """Of sampling; the policy's log-probabilities are of the same temperature."""
    top_p: float = key(1.0, above=0, high=1)
    """Nucleus sampling; 1: off."""
    top_k: int = key(0, low=0)
    """0: off."""
    drafter: Literal["model", "suffix", "hybrid"] = "model"
    """Who proposes tokens: the draft model, the suffix drafter (see [suffix]), or for each request and step the one
    of them that is expected to save more. Without a draft, "model" means no speculation."""
    num_draft_tokens: int = key(4, low=1)
    """Tokens that the draft model proposes at most per verify step."""
    max_num_seqs: int = key(64, low=1, may_change=True)
    """Requests an engine runs at a time."""
    tail_weight: float = key(1.0, low=0)
    """Dispatch over engines, longest first: a request's weight is its expected tokens plus this times what the
    90th percentile has over the mean."""
    kv_cache_gb: float = key(0.0, low=0, may_change=True)
    """KV cache of one engine in GB; 0: what gpu_memory_utilization leaves (CUDA), 0.25 (CPU)."""
    gpu_memory_utilization: float = key(0.5, above=0, below=1, may_change=True)
    """CUDA: share of the GPU the engine may take."""
    sleep: bool = key(True, may_change=True)
    """CUDA: free the engine's memory while training."""
    enforce_eager: bool = key(False, may_change=True)
    """CUDA: no CUDA graphs."""

    @property
    def law(self) -> SamplingLaw:
        """The law that the engine samples with and the trainer scores with."""
        return SamplingLaw(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(kw_only=True, slots=True)
class Suffix:
    """The suffix drafter: proposes what earlier responses to the same problem went on with."""

    window: int = key(0, low=0)
    """Steps that responses are remembered for; 0: two epochs, at least 16."""
    max_bytes: int = key(4 << 30, low=1)
    """Memory for them, about 30 bytes a token; beyond it the oldest are forgotten."""
    recency: float = key(0.98, above=0, high=1)
    """Each newer generation of a problem's responses scales an older one's acceptance estimates by this."""
    max_draft: int = key(24, low=1)
    """Tokens it proposes at most per verify step."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """How much of a draft is verified (docs/speculation.md)."""

    rule: str = "price"
    """off, fixed, unlimited, das, das_closed, price, or a rule of your own (speculation/budgets/registry.py).
    price: tokens that are expected to save more time than they cost, by a table measured at the start."""
    fixed_tokens: int = key(4, low=0)
    """fixed: draft tokens of every request and step."""
    class_tokens: list[int] = field(default_factory=lambda: [0, 8, 24])
    """das: draft tokens of short, medium and long requests."""
    short_below: int = key(256, low=1)
    """das, metrics: responses below this length are short."""
    long_from: int = 1024
    """das, metrics: responses from this length on are long."""
    capacity: float = key(0.8, above=0, below=1)
    """das_closed: share of a response that drafts can ever cover."""
    focus: float = key(0.75, low=0, high=1)
    """price: 0 counts all requests alike (throughput), 1 only those that will end last (makespan)."""
    cost_table: str = ""
    """price, das, das_closed: JSON of a run before (cost.json) instead of a measurement."""


@dataclass(kw_only=True, slots=True)
class RL:
    clip_low: float = key(0.2, low=0, below=1)
    """See clip_high."""
    clip_high: float = key(0.28, low=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher)."""
    tis_cap: float = key(2.0, low=0)
    """Cap of the truncated importance weight between trainer and engine; 0 turns the weight off."""
    kl_coef: float = key(0.0, low=0)
    """Weight of the KL term against the policy the run started from; 0 keeps no reference copy."""
    normalise_std: bool = True
    """Divide a group's advantages by their standard deviation (GRPO); false only subtracts the mean."""
    overlong: Literal["mask", "penalise", "keep"] = "mask"
    """Responses cut at max_new_tokens: out of the policy loss, a reward penalty, or as any other."""
    overlong_penalty: float = key(1.0, low=0)
    """penalise: subtracted from the reward of a cut response."""
    minibatches: int = key(1, low=1)
    """Optimizer updates per step; above 1, the old log-probabilities are computed first."""


@dataclass(kw_only=True, slots=True)
class Train:
    pack_tokens: int = key(4096, low=1)
    """Tokens of a pack, the microbatch of one rank."""
    logprob_rows: int = key(2048, low=1)
    """Rows whose logits exist at a time in the policy's loss."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""


@dataclass(kw_only=True, slots=True)
class Warmup:
    """Supervised steps before RL that teach the answer format; cached under run.dir/cache."""

    steps: int = key(0, low=0)
    """Number of supervised steps; 0: no warm-up."""
    problems_per_step: int = key(64, low=1)
    """Problems of a warm-up step, over all ranks."""
    lr: float = key(1e-3, low=0)
    """Highest learning rate of the policy's warm-up."""
    draft_steps: int = key(0, low=0)
    """The draft learns during the last n of the warm-up's steps."""
    template: str = "<answer>{answer}</answer>"
    """The response that is taught; {question} and {answer} are filled in."""


@dataclass(kw_only=True, slots=True)
class Eval:
    every: int = key(0, low=0)
    """Evaluate on held-out problems every n steps, and after the last; 0: never."""
    samples_per_problem: int = key(1, low=1)
    """Responses to each held-out problem."""
    frozen_draft: bool = False
    """Also measure tau of the draft the RL steps started with, on the same policy and problems."""


@dataclass(kw_only=True, slots=True)
class Parallel:
    dp_shard: int = -1
    """Replicas of a pipeline; FSDP2 shards weights over dp_shard * cp ranks. -1: as many as are left."""
    cp: int = key(1, low=1)
    """Context parallelism: ranks that share every pack, each with its rows."""
    pp: int = key(1, low=1)
    """Pipeline parallelism: stages the policy's layers are split into."""
    attention: Literal["auto", "ring", "gather", "query_ring"] = "auto"
    """cp > 1, the policy's layers: keys and values ride a ring or are gathered, or queries travel; auto: by
    bytes sent, gathered only where 4 GB hold all layers' (docs/attention.md)."""
    schedule: Literal["1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble"] = "1F1B"
    """pp > 1: order of forwards and backwards; Interleaved1F1B and ZBVZeroBubble have two stages a rank."""
    layers_per_stage: list[int] = field(default_factory=list)
    """pp > 1: layers of each stage, for a last stage with less to do; []: as even as can be."""
    draft_placement: Literal["last", "spread"] = "last"
    """pp > 1: the rank of the last stage trains the draft, or all ranks take turns by microbatch."""
    tap_timeout_s: float = key(600.0, above=0)
    """pp > 1: longest wait for a tap from another stage; on CUDA from when it is expected, so above the time of a
    step."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    every: int = key(20, low=0)
    """Save after every n-th step, after the last, and when the run is told to stop; 0: never."""
    keep_last: int = key(2, low=1)
    """The newest n stay."""
    keep_best: int = key(0, low=0)
    """So do the n best of the run."""
    best: Literal["reward", "tau"] = "reward"
    """What keep_best goes by: mean reward or acceptance length, as measured in the checkpoint's step."""
    background: bool = True
    """Train on while a checkpoint is written; only its copy to host memory is waited for."""


@dataclass(kw_only=True, slots=True)
class Guards:
    """Crossing a bound is a warning; too many steps in a row end the run."""

    patience: int = key(3, low=1)
    """Steps in a row beyond a bound, this section's or guards.min_tau, that end the run."""
    max_kl: float = key(0.5, low=0)
    """Most that the trainer's policy may be from the engine's: policy/kl_train_rollout, nats a token; 0: off."""
    min_tau: float = key(0.0, low=0)
    """Canary: least mean acceptance length (bonus token counted) of the draft model in a step's rollouts; 0: off."""


@dataclass(kw_only=True, slots=True)
class Config:
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    draft: Draft = field(default_factory=Draft)
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    rollout: Rollout = field(default_factory=Rollout)
    suffix: Suffix = field(default_factory=Suffix)
    budget: Budget = field(default_factory=Budget)
    rl: RL = field(default_factory=RL)
    train: Train = field(default_factory=Train, metadata=MAY_CHANGE)
    optim: Optim = field(default_factory=Optim)
    warmup: Warmup = field(default_factory=Warmup)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint, metadata=MAY_CHANGE)
    guards: Guards = field(default_factory=Guards, metadata=MAY_CHANGE)
    parallel: Parallel = field(default_factory=Parallel, metadata=MAY_CHANGE)


def longest_draft(config: Config) -> int:
    """Most draft tokens of one request and verify step."""
    model, suffix = config.rollout.num_draft_tokens, config.suffix.max_draft
    return {"model": model, "suffix": suffix, "hybrid": max(model, suffix)}[config.rollout.drafter]
