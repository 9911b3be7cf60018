"""Log-probabilities of tokens under the law they were sampled with, a chunk of rows at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchspec.records import Batch, SamplingLaw


def target_logprobs(
    final: Tensor, head: Tensor, batch: Batch, law: SamplingLaw, rows_at_a_time: int
) -> tuple[Tensor, Tensor]:
    """Return log-probability of each row's target and entropy, fp32 [T] each (fp64 for fp64 inputs).

    Only rows with a valid target are computed. Their logits exist `rows_at_a_time` rows at a time and are computed
    again in the backward pass.

    Args:
        final: final hidden states [T, E].
        head: [V, E].
    """
    rows = batch.target_mask.nonzero().squeeze(-1)
    chunks = [
        checkpoint(
            chunk_logprobs,
            final[part],
            head,
            batch.targets[part],
            law,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for part in rows.split(rows_at_a_time)  # without any row one empty chunk keeps the graph whole
    ]
    logprobs, entropy = (torch.cat(column) for column in zip(*chunks))
    zeros = logprobs.new_zeros(batch.targets.shape)
    return zeros.index_put((rows,), logprobs), zeros.index_put((rows,), entropy)


def chunk_logprobs(final: Tensor, head: Tensor, targets: Tensor, law: SamplingLaw) -> tuple[Tensor, Tensor]:
    """Do `target_logprobs` of some rows at once, all of them with a target."""
    logits = F.linear(final, head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / law.temperature
    if law.top_k or law.top_p < 1:
        return _truncated_logprobs(logits, targets, law)
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _truncated_logprobs(logits: Tensor, targets: Tensor, law: SamplingLaw) -> tuple[Tensor, Tensor]:
    """Return log-probability of `targets` and entropy, [N] each, from logits [N, V] that `law` truncates.

    The kept tokens follow from these logits, not from the engine's, and their choice has no gradient. Only the sum
    over the kept ones is used, so it does not matter which of several equal logits a sort puts first. A target
    that is not among the kept ones was so in the engine, whose logits differ in rounding; it is added to them. Its
    probability is then too small by at most its own share, which is the known bias of a truncated law.
    """
    kept, least = _truncate(logits, law)
    total = kept.logsumexp(-1)
    target = logits.gather(-1, targets[:, None]).squeeze(-1)
    total = torch.where(target < least, torch.logaddexp(total, target), total)
    with torch.no_grad():
        entropy = torch.special.entr(kept.softmax(-1)).sum(-1)
    return target - total, entropy


def _truncate(logits: Tensor, law: SamplingLaw) -> tuple[Tensor, Tensor]:
    """Return logits [N, V] in which those dropped are -inf, in any order, and the least kept one of each row, [N]."""
    least = logits.detach().amin(-1)
    if 0 < law.top_k < logits.shape[-1]:
        least = logits.detach().topk(law.top_k).values[:, -1]
        logits = logits.masked_fill(logits < least[:, None], -torch.inf)
    if law.top_p < 1:
        logits = logits.sort(-1, descending=True).values
        with torch.no_grad():
            dropped = logits.softmax(-1).flip(-1).cumsum(-1).flip(-1) <= 1 - logits.new_tensor(law.top_p)
            dropped[:, 0] = False  # at least one stays
            least = logits.masked_fill(dropped | logits.isinf(), torch.inf).amin(-1)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits, least
