"""Negative log-likelihood of the counted tokens: supervised fine-tuning, and the auxiliary term of DPO.

L = (1 / N_tok) sum_t -w_t logprob_t        or, by sequence,    L_b = sum_t -logprob_bt, or its mean over t

sums = nll_loss(logprobs, batch)
"""

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per


def nll_loss(logprobs: Tensor, batch: TrainBatch) -> LossSums:
    """Return the sum over tokens.

    Args:
        logprobs: [T] float with gradient.
        batch: the micro-batch.
    """
    index = (batch.token_weights > 0).nonzero().squeeze(1)
    loss = (batch.token_weights[index].to(logprobs.dtype) * -logprobs[index]).sum()
    metrics = {
        "loss": Metric(loss.item(), Per.TOKENS),
        "num_unmasked_tokens": Metric(batch.token_weights.sum().item(), Per.NONE),
        "num_valid_samples": Metric(batch.sample_weights.sum().item(), Per.NONE),
    }
    return LossSums(loss, Per.TOKENS, metrics)


def nll_by_sequence(logprobs: Tensor, batch: TrainBatch, *, average: bool) -> Tensor:
    """Return L_b of every sequence, [N]: the sum over its tokens, or their mean; 0 for a sequence without weight."""
    return sum_by_sequence(-logprobs, batch, average=average)


def sum_by_sequence(values: Tensor, batch: TrainBatch, *, average: bool) -> Tensor:
    """Sum, or average, [T] values over the counted tokens of every sequence, [N]; weights have no part in it."""
    index = (batch.token_weights > 0).nonzero().squeeze(1)
    owners = batch.sequence_ids[index]
    sums = values.new_zeros(batch.num_sequences).index_add(0, owners, values[index])
    if not average:
        return sums
    return sums / torch.bincount(owners, minlength=batch.num_sequences).clamp(min=1).to(values.dtype)
