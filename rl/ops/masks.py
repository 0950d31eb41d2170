"""Masked reductions over jagged [T] columns, safe against anything that stands in masked positions.

Values are selected before they are multiplied: 0 * NaN is NaN, so a weight of 0 alone would not keep a masked NaN or
infinity out of the sum, nor out of the gradient. Losses divide by global counts that the caller provides; nothing here
communicates.

    weights = token_weights(batch_loss_mask, sample_weights, offsets)
    loss = masked_mean(token_losses, weights, denominator=global_tokens)
"""

import torch
from torch import Tensor

_EPSILON = 1e-8  # an empty mask gives 0, not NaN


def token_weights(loss_mask: Tensor, sample_weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the weight of each token: its mask times the weight of its sequence.

    Args:
        loss_mask: [T] bool or 0/1.
        sample_weights: [N] float in [0, 1]; 0 drops a sequence.
        offsets: [N + 1] int64, where each sequence starts; offsets[N] = T.

    Returns:
        [T] float32.
    """
    lengths = offsets[1:] - offsets[:-1]
    spread = torch.repeat_interleave(sample_weights.to(torch.float32), lengths, output_size=loss_mask.shape[0])
    return loss_mask.to(torch.float32) * spread


def select(values: Tensor, weights: Tensor) -> Tensor:
    """Return `values * weights`, exactly 0 (value and gradient) where the weight is 0."""
    kept = weights != 0
    return torch.where(kept, values, torch.zeros((), dtype=values.dtype, device=values.device)) * weights


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return sum(values * weights) over all positions, a scalar."""
    return select(values, weights).sum()


def masked_mean(values: Tensor, weights: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """Return the weighted sum divided by `denominator`, or by the sum of the weights.

    An empty mask gives 0. With a global denominator, the sum of the results over micro-batches and ranks is the global
    mean, however the batch was split.
    """
    count = weights.sum() if denominator is None else denominator
    return masked_sum(values, weights) / (count + _EPSILON)


def masked_variance(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance (divisor n - 1) of the unmasked values; 0 when there are fewer than two."""
    kept = mask != 0
    n = kept.sum()
    weights = kept.to(values.dtype)
    centred = select(values - masked_mean(values, weights), weights)
    return torch.where(n > 1, centred.square().sum() / (n - 1).clamp(min=1), torch.zeros_like(centred.sum()))


def sequence_sums(values: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return sum(values * weights) of each sequence.

    Args:
        values: [T] float.
        weights: [T] float.
        offsets: [N + 1] int64.

    Returns:
        [N], in the dtype of the products.
    """
    lengths = offsets[1:] - offsets[:-1]
    owners = torch.repeat_interleave(lengths, output_size=values.shape[0])
    products = select(values, weights)
    return products.new_zeros(lengths.shape[0]).index_add(0, owners, products)


def sequence_means(values: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the weighted mean of each sequence, [N]; 0 for a sequence without weight."""
    return sequence_sums(values, weights, offsets) / (
        sequence_sums(torch.ones_like(values), weights, offsets) + _EPSILON
    )
