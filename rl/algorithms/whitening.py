"""Whitening: centre values and divide them by their standard deviation, over those that vote.

Values that do not vote become 0. No vote at all gives zeros, and one vote gives 0: nothing is ever divided by 0.
"""

import torch
from torch import Tensor

# Values that lie closer together than this, relative to the largest (at least 1), differ by rounding alone.
_ROUNDING = 1e-6


def whiten_biased(values: Tensor, votes: Tensor) -> Tensor:
    """Return (a - mean) / sqrt(max(var, 1e-8)) with the biased variance (Hu 2025, "REINFORCE++").

    Args:
        values: [K] float; anything where not voting.
        votes: [K] bool. Each vote weighs the same, so over tokens a long response weighs more than a short one.

    Returns:
        [K] float32.
    """
    centred, count = _centre(values, votes)
    variance = centred.square().sum() / max(count, 1)
    return (centred / variance.clamp(min=1e-8).sqrt()).to(torch.float32)


def whiten_unbiased(values: Tensor, votes: Tensor, epsilon: float) -> Tensor:
    """Return (a - mean) / sqrt(var + epsilon) with the unbiased variance; values equal up to rounding become 0.

    Args:
        values: [K] float; anything where not voting.
        votes: [K] bool.
        epsilon: Added to the variance; 0 leaves it as it is.

    Returns:
        [K] float32.
    """
    centred, count = _centre(values, votes)
    # A variance of equal values need not round to 0, nor need a sum of terms that cancel: divided by it, rounding would
    # become a signal.
    if count < 2 or _are_equal(values[votes]):
        return torch.zeros_like(centred, dtype=torch.float32)
    variance = centred.square().sum() / (count - 1)
    return (centred / (variance + epsilon).sqrt()).to(torch.float32)


def _are_equal(values: Tensor) -> bool:
    return bool(values.max() - values.min() <= _ROUNDING * values.abs().max().clamp(min=1))


def _centre(values: Tensor, votes: Tensor) -> tuple[Tensor, int]:
    count = int(votes.sum())
    kept = torch.where(votes, values.to(torch.float64), 0.0)
    mean = kept.sum() / max(count, 1)
    return torch.where(votes, kept - mean, 0.0), count
