"""What crosses a boundary between two parts of torchspec.

Shape letters: T tokens of a pack, E policy model dim, V vocabulary, K passes of TTT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # `import torchspec` stays cheap: torch is only needed for annotations here
    import torch

Message = dict[str, str]


@dataclass(kw_only=True, slots=True)
class Problem:
    """One task the policy is asked to solve; the unit that groups and suffix histories are keyed by.

    Example:
        Problem(
            id="spell_backward/17",
            messages=[{"role": "user", "content": "Spell this word backward: stone"}],
            answer="enots",
            meta={"entry": {...}},      # what the reward needs beyond the answer
        )
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingLaw:
    """How a response's tokens are drawn from the policy's logits; engine and trainer must agree on it.

    Logits are divided by `temperature`. Then all but the `top_k` largest are dropped (0: none is; ties with the last
    one stay). Then the smallest are dropped while the probability of all dropped ones is at most 1 - `top_p`.

    Example: probabilities 0.5, 0.3, 0.15, 0.05 under three laws
        SamplingLaw(temperature=1.0)                # 0.5, 0.3, 0.15, 0.05
        SamplingLaw(temperature=1.0, top_k=2)       # 0.625, 0.375, 0, 0
        SamplingLaw(temperature=1.0, top_p=0.9)     # 0.526, 0.316, 0.158, 0
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(kw_only=True, slots=True)
class SpecStats:
    """What the engine's verifier did for one request.

    `drafted[j]` and `accepted[j]` count verify steps whose j-th draft token was proposed and accepted,
    `steps` counts verify steps that had at least one draft token.

    Example: 3 steps with drafts of 2 tokens, accepting 2, 0 and 1 of them:
        SpecStats(steps=3, drafted=[3, 3], accepted=[2, 1])     # tau = 1 + 3 / 3 = 2.0
    """

    steps: int
    drafted: list[int]
    accepted: list[int]

    @property
    def tau(self) -> float:
        """Mean acceptance length, the bonus token counted; 1.0 where nothing was drafted."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps else 1.0

    @classmethod
    def total(cls, stats: Iterable[SpecStats], num_draft_tokens: int) -> SpecStats:
        """The sum of several requests' counts, for drafts of at most `num_draft_tokens` tokens."""
        total = cls(steps=0, drafted=[0] * num_draft_tokens, accepted=[0] * num_draft_tokens)
        for one in stats:
            total.steps += one.steps
            for j, (drafted, accepted) in enumerate(zip(one.drafted, one.accepted)):
                total.drafted[j] += drafted
                total.accepted[j] += accepted
        return total


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sampled response, with the versions of the weights that made it.

    `logprobs[t]` is the engine's natural-log probability of `tokens[t]` under the distribution it was
    sampled from (after temperature, top-p and top-k). `finish` is "stop" (the model ended the response;
    the end token is the last of `tokens`) or "length" (cut by max_new_tokens or the context).

    Example:
        Rollout(
            problem_id="spell_backward/17", sample=2,
            prompt_tokens=[5, 18, 40, 6], tokens=[33, 12, 2], logprobs=[-0.1, -1.2, -0.01],
            finish="stop", policy_version=12, draft_version=12,
            spec=SpecStats(steps=1, drafted=[1, 1], accepted=[1, 1]),
            text="so", reward=0.5, reward_parts={"format": 0.5}, advantage=-0.7,
        )
    """

    problem_id: str
    sample: int
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish: str
    policy_version: int
    draft_version: int
    spec: SpecStats | None = None
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    train: bool = True
    """False keeps the response out of the policy loss (overlong, masked); the draft still learns from it."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """One pack: a flat stream of whole documents. There is no padded form anywhere.

    A document is a prompt followed by its response. Every array is *row-aligned*: row i holds what concerns
    the prediction of the document's next token, `targets[i] == tokens[i + 1]`; the last row of a document
    has target 0 and `target_mask` False. `chain[i]` counts the tokens from the document's i + 2 on that the
    policy sampled without a gap: the draft is trained on row i in passes 1 to `chain[i]`, since a chain of
    drafts ends at the first token the policy did not sample. It is 0 where token i + 1 belongs to the prompt: the
    policy itself samples a response's first token, and no engine drafts there.

    All shifts are made here, per document. Under context parallelism a rank then keeps some rows of every
    array (`parallel.context.local_rows`), while `cu_seqlens` stays that of the whole pack.

    Example: documents [7 8 | 9 2] and [7 | 3 2], prompt | response, advantages +1 and -1:
        tokens           7   8   9   2   7   3   2      int64 [T]
        positions        0   1   2   3   0   1   2      int64 [T]
        targets          8   9   2   0   3   2   0      int64 [T]
        target_mask      F   T   T   F   T   T   F      bool  [T]
        rollout_logprobs 0  -1  -.1  0 -.5 -.2   0      fp32  [T]
        advantages       0   1   1   0  -1  -1   0      fp32  [T]
        chain            0   1   0   0   1   0   0      int64 [T], always on CPU
        cu_seqlens       0 4 7                          int32 [documents + 1], always on CPU
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    target_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    chain: torch.Tensor
    cu_seqlens: torch.Tensor
    group: str = ""
    """Name of the process group whose ranks hold the pack's other rows; "": this rank holds all."""
    transport: str = "ring"
    """How the policy's keys and values cross that group: "ring", "gather" or "query_ring"."""

    def to(self, device: torch.device) -> Batch:
        """Move to `device`; `chain` and `cu_seqlens` stay on the host, where the work is planned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self.DEVICE_ROWS}
        return replace(self, **moved)

    DEVICE_ROWS: ClassVar[tuple[str, ...]] = (
        "tokens",
        "positions",
        "targets",
        "target_mask",
        "rollout_logprobs",
        "advantages",
    )
    """Names of the row-aligned arrays that live on the trainer's device."""


@dataclass(kw_only=True, slots=True)
class Taps:
    """Policy activations the draft consumes, always detached: the draft's loss never reaches the policy.

    Row by row as the batch they belong to: `embeds[i]` is the policy's embedding of `tokens[i]`; `aux[j][i]`
    the hidden state entering layer `aux_layers[j]` (0-based, so id l is the output of layer l - 1, vLLM's
    convention); `final[i]` the hidden state after the last norm, whose product with the head gives the
    teacher's logits.

    Example: a pack of T = 7 tokens and a policy of width E = 64 with aux layers (1, 2, 3):
        Taps(embeds=[7, 64], aux=([7, 64], [7, 64], [7, 64]), final=[7, 64])
    """

    embeds: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    final: torch.Tensor
