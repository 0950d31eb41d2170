"""What a policy-gradient loss reports beside its value: ratios, and how far trainer and generator are apart.

Everything here is without gradient. Sums are weighted like the loss and divided later by global counts; extrema are
absent where no token counts.
"""

import math

import torch
from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.ops.kl import KlEstimator, kl_estimate


def ratio_metrics(tokens: CountedTokens, ratios: Tensor, clamped: Tensor) -> dict[str, Metric]:
    """Return mean and extrema of the ratios and of what the bounds leave of them, both [K]."""
    metrics = {
        "probs_ratio": tokens.per_token(ratios),
        "probs_ratio_clamped": tokens.per_token(clamped),
    }
    if ratios.numel() == 0:
        return metrics
    for name, values in (("probs_ratio", ratios), ("probs_ratio_clamped", clamped)):
        metrics[f"{name}_min"] = Metric(values.min().item(), Per.MIN)
        metrics[f"{name}_max"] = Metric(values.max().item(), Per.MAX)
    return metrics


def generator_metrics(tokens: CountedTokens, kind: KlEstimator) -> dict[str, Metric]:
    """Compare the trainer's log-probabilities at the start of the step with the generator's.

    With e = generation_logprob - prev_logprob: token_mult_prob_error is the mean of exp(|e|), 1 at best; gen_kl_error
    and policy_kl_error estimate KL(generator || trainer) and KL(trainer || generator) from the generator's tokens,
    without clamps; approx_entropy is -mean(exp(logprob - generation_logprob) logprob).
    """
    logprobs, old, generation = tokens.logprobs.detach(), tokens.prev_logprobs, tokens.generation_logprobs
    return {
        "token_mult_prob_error": tokens.per_token(torch.exp((generation - old).abs())),
        "gen_kl_error": tokens.per_token(_plain_kl(generation, old, kind)),
        "policy_kl_error": tokens.per_token(_plain_kl(old, generation, kind)),
        "js_divergence_error": tokens.per_token(_js_divergence(old, generation)),
        "approx_entropy": tokens.per_token(-torch.exp(logprobs - generation) * logprobs),
    }


def logprob_gap(tokens: CountedTokens, batch: TrainBatch) -> dict[str, Metric]:
    """Return the largest |trainer - generator| over tokens that the version in training sampled.

    There both are equal but for rounding, so this watches the whole of refit, sampler and masks. Absent when there is
    no such token. A gap that is no number counts apart.
    """
    if batch.policy_version is None:
        return {}
    is_own = batch.token_versions[tokens.index] == batch.policy_version
    gaps = (tokens.prev_logprobs - tokens.generation_logprobs).abs()[is_own]
    if gaps.numel() == 0:
        return {}
    finite = gaps[torch.isfinite(gaps)]
    # A maximum drops NaN on its way through micro-batches and ranks, a count does not.
    broken = {"num_nonfinite_logprob_gaps": Metric(float(gaps.numel() - finite.numel()), Per.NONE)}
    return broken | ({"max_logprob_diff": Metric(finite.max().item(), Per.MAX)} if finite.numel() else {})


def _plain_kl(logprobs: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    return kl_estimate(logprobs, reference, kind, weight=None, input_clamp=None, output_clamp=None)


def _js_divergence(old: Tensor, generation: Tensor) -> Tensor:
    """Return .5 f(old) + .5 f(generation), f(a) = exp(a - m) - (a - m) - 1, m = log of the two's mean probability."""
    mixture = torch.logaddexp(old, generation) - math.log(2)
    sides = torch.stack([old - mixture, generation - mixture])
    return (torch.expm1(sides) - sides).mean(dim=0)
