"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

With d = reference_logprob - logprob (Schulman, "Approximating KL divergence", 2020):
k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. Sums and masks are the caller's.

    weight = score_function_weight(logprobs)
    kl = kl_estimate(logprobs, reference_logprobs, "k3", weight=weight, input_clamp=20.0, output_clamp=10.0)
"""

from typing import Literal

import torch
from torch import Tensor

from rl.core.errors import ConfigError

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: KlEstimator,
    *,
    weight: Tensor | None,
    input_clamp: float | None,
    output_clamp: float | None,
) -> Tensor:
    """Return one estimate per token.

    Args:
        logprobs: [...] float, of the policy; gradients flow through it.
        reference_logprobs: [...] float.
        estimator: k1 | k2 | k3.
        weight: [...] factor of each estimate (see `score_function_weight`), or None for 1. It is detached on tokens
            whose log-ratio the input clamp changes, so that no gradient flows from them.
        input_clamp: bound of |d|, or None.
        output_clamp: bound of |estimate| after weighting, or None.

    Raises:
        ConfigError: unknown estimator.
    """
    log_ratio = reference_logprobs - logprobs
    if input_clamp is not None:
        is_clamped = log_ratio.abs() > input_clamp
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
        if weight is not None:
            weight = torch.where(is_clamped, weight.detach(), weight)
    estimate = _estimate(log_ratio, estimator)
    if weight is not None:
        estimate = weight * estimate
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def score_function_weight(logprobs: Tensor) -> Tensor:
    """Return exp(logprob - stop_gradient(logprob)): 1, with the gradient of the sampling distribution."""
    return torch.exp(logprobs - logprobs.detach())


def importance_weight(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return exp(logprob - sampler_logprob) with gradient: the weight of a token that another distribution sampled.

    A weight that is no finite number is 0, and so is its gradient.
    """
    log_weight = logprobs - sampler_logprobs
    # The choice is made before the exponential: behind it, the gradient of a discarded infinity would be NaN.
    is_finite = torch.isfinite(log_weight) & torch.isfinite(torch.exp(log_weight.detach()))
    safe = torch.where(is_finite, log_weight, torch.zeros_like(log_weight))
    return torch.where(is_finite, torch.exp(safe), torch.zeros_like(safe))


def _estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ConfigError(f"loss_fn.reference_policy_kl_type={estimator!r} is unknown; use k1, k2 or k3")
