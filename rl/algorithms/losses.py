"""Losses over log-probabilities. Each returns unnormalised sums; the trainer divides once by global counts.

Only tokens with weight are ever looked at: they are taken out first, so whatever stands elsewhere (NaN included)
reaches neither value nor gradient.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.algorithms.config import LossConfig
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.ops.kl import kl_estimate, score_function_weight


@dataclass(frozen=True)
class _Tokens:
    """The K tokens that count, and what the formulas need of each."""

    logprobs: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequence_shares: Tensor


@dataclass(frozen=True)
class _Surrogate:
    """The clipped surrogate of each token and the ratios that it was made from."""

    losses: Tensor
    ratios: Tensor
    clamped_ratios: Tensor


@dataclass(frozen=True)
class ClippedPolicyLoss:
    """The clipped policy-gradient loss (PPO: Schulman et al. 2017, equation 7; dual clip: Ye et al. 2020, equation 4).

    With r = exp(lp - lp_prev), advantage A and generator weight w = exp(lp_prev - lp_generation), per token:

        l = w * max(-A r, -A clamp(r, 1 - clip_min, 1 + clip_max)) + beta * KL(policy || reference)

    where for A < 0 the max is bounded by -A c when dual clipping is on, and w is 1 unless the correction is on.
    Truncating w leaves the denominators as they are: such tokens still count.

    Attributes:
        config: The `loss_fn` section.
        uses_prev: Whether `prev_logprobs` is a column of its own; otherwise the policy is at the start of its step, and
            lp_prev is lp without gradient.
    """

    config: LossConfig
    uses_prev: bool

    @property
    def uses_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.config.reference_policy_kl_penalty > 0

    @property
    def uses_entropy(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.config.entropy_coef > 0

    def contributes(self, batch: TrainBatch) -> Tensor:
        """Return [N] bool: sequences with weight, unless only advantages matter and theirs are all 0."""
        weighted = batch.token_weights > 0
        if batch.advantages is not None and not self.uses_reference and not self.uses_entropy:
            weighted = weighted & (batch.advantages != 0)
        counts = torch.zeros(batch.num_sequences).index_add(0, batch.sequence_ids, weighted.to(torch.float32))
        return counts > 0

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        """Return the sums of one micro-batch.

        Args:
            logprobs: [T] float32 with gradient.
            entropy: [T] float32.
            batch: With `advantages`, and `prev_logprobs` and `reference_logprobs` as `uses_prev` and `uses_reference`
                say.

        Raises:
            ValueError: a needed column is missing.
        """
        index = (batch.token_weights > 0).nonzero().squeeze(1)
        tokens = self._take(logprobs, batch, index)
        surrogate = self._surrogate(tokens)
        correction = self._generator_weights(tokens)
        weight = correction if self.config.use_importance_sampling_correction else torch.ones_like(correction)
        shares = tokens.weights if self.config.token_level_loss else tokens.sequence_shares
        loss = (shares * weight * surrogate.losses).sum()
        kl = self._kl_sum(tokens, batch, index, shares)
        if kl is not None:
            loss = loss + self.config.reference_policy_kl_penalty * kl
        per = Per.TOKENS if self.config.token_level_loss else Per.SEQUENCES
        metrics = {
            "loss": Metric(loss.item(), per),
            "kl_penalty": Metric(0.0 if kl is None else kl.item(), per),
            "num_valid_samples": Metric(batch.sample_weights.sum().item(), Per.NONE),
        }
        with torch.no_grad():
            metrics |= self._ratio_metrics(tokens, surrogate)
            metrics |= self._generator_metrics(tokens, correction)
            metrics |= _logprob_gap(tokens, batch, index)
            metrics["entropy"] = _token_sum(tokens, entropy.detach()[index])
        return LossSums(loss, per, metrics)

    def _take(self, logprobs: Tensor, batch: TrainBatch, index: Tensor) -> _Tokens:
        if batch.advantages is None:
            raise ValueError("the clipped policy loss needs the column advantages")
        taken = logprobs[index]
        prev = taken.detach()
        if self.uses_prev:
            if batch.prev_logprobs is None:
                raise ValueError("several optimizer steps per batch need the column prev_logprobs")
            prev = batch.prev_logprobs[index]
        counts = torch.zeros(batch.num_sequences).index_add(0, batch.sequence_ids, batch.loss_mask.to(torch.float32))
        owners = batch.sequence_ids[index]
        return _Tokens(
            logprobs=taken,
            prev_logprobs=prev,
            generation_logprobs=batch.generation_logprobs[index],
            advantages=batch.advantages[index],
            weights=batch.token_weights[index],
            sequence_shares=batch.sample_weights[owners] / counts[owners],
        )

    def _surrogate(self, tokens: _Tokens) -> _Surrogate:
        on_policy = self.config.force_on_policy_ratio
        prev = tokens.logprobs.detach() if on_policy else tokens.prev_logprobs
        ratios = torch.exp(tokens.logprobs - prev)
        clamped = ratios.clamp(1 - self.config.ratio_clip_min, 1 + self.config.ratio_clip_max)
        losses = torch.maximum(-tokens.advantages * ratios, -tokens.advantages * clamped)
        if self.config.ratio_clip_c is not None:
            bounded = torch.minimum(losses, -tokens.advantages * self.config.ratio_clip_c)
            losses = torch.where(tokens.advantages < 0, bounded, losses)
        return _Surrogate(losses, ratios, clamped)

    def _kl_sum(self, tokens: _Tokens, batch: TrainBatch, index: Tensor, shares: Tensor) -> Tensor | None:
        if not self.uses_reference:
            return None
        if batch.reference_logprobs is None:
            raise ValueError("loss_fn.reference_policy_kl_penalty > 0 needs the column reference_logprobs")
        estimates = kl_estimate(
            tokens.logprobs,
            batch.reference_logprobs[index],
            self.config.reference_policy_kl_type,
            weight=score_function_weight(tokens.logprobs),
            input_clamp=self.config.kl_input_clamp_value,
            output_clamp=self.config.kl_output_clamp_value,
        )
        return (shares * estimates).sum()

    def _generator_weights(self, tokens: _Tokens) -> Tensor:
        """Return w of each token, without gradient, truncated when that is configured."""
        raw = _raw_generator_weights(tokens)
        bounds = self._bounds()
        return raw if bounds is None else raw.clamp(*bounds)

    def _bounds(self) -> tuple[float, float] | None:
        if self.config.truncated_importance_sampling_type is None:
            return None
        low, high = (
            self.config.truncated_importance_sampling_ratio_min,
            self.config.truncated_importance_sampling_ratio,
        )
        return (0.0 if low is None else low), (math.inf if high is None else high)

    def _ratio_metrics(self, tokens: _Tokens, surrogate: _Surrogate) -> dict[str, Metric]:
        ratios, advantages = surrogate.ratios, tokens.advantages
        bound = self.config.ratio_clip_c
        low = (advantages < 0) & (ratios < 1 - self.config.ratio_clip_min)
        high = (advantages > 0) & (ratios > 1 + self.config.ratio_clip_max)
        dual = (advantages < 0) & (ratios > (math.inf if bound is None else bound))
        return {
            "probs_ratio": _token_sum(tokens, ratios),
            "probs_ratio_clamped": _token_sum(tokens, surrogate.clamped_ratios),
            "probs_ratio_min": _extremum(ratios, Per.MIN),
            "probs_ratio_max": _extremum(ratios, Per.MAX),
            "probs_ratio_clamped_min": _extremum(surrogate.clamped_ratios, Per.MIN),
            "probs_ratio_clamped_max": _extremum(surrogate.clamped_ratios, Per.MAX),
            "clipfrac_low": _token_sum(tokens, low.to(torch.float32)),
            "clipfrac_high": _token_sum(tokens, high.to(torch.float32)),
            "dual_clipfrac": _token_sum(tokens, dual.to(torch.float32)),
        }

    def _generator_metrics(self, tokens: _Tokens, correction: Tensor) -> dict[str, Metric]:
        """Compare the trainer's log-probabilities at the start of the step with the generator's."""
        old, generation = tokens.prev_logprobs, tokens.generation_logprobs
        kind = self.config.reference_policy_kl_type
        approximation = torch.exp(tokens.logprobs - generation) * tokens.logprobs
        metrics = {
            "token_mult_prob_error": _token_sum(tokens, torch.exp((generation - old).abs())),
            "gen_kl_error": _token_sum(tokens, _plain_kl(generation, old, kind)),
            "policy_kl_error": _token_sum(tokens, _plain_kl(old, generation, kind)),
            "js_divergence_error": _token_sum(tokens, _js_divergence(old, generation)),
            "sampling_importance_ratio": _token_sum(tokens, correction),
            "approx_entropy": _token_sum(tokens, -approximation),
        }
        bounds = self._bounds()
        if bounds is not None:
            raw = _raw_generator_weights(tokens)
            metrics["is_oob_ratio"] = _token_sum(tokens, ((raw < bounds[0]) | (raw > bounds[1])).to(torch.float32))
        return metrics


def _raw_generator_weights(tokens: _Tokens) -> Tensor:
    weights = torch.exp(tokens.prev_logprobs.detach() - tokens.generation_logprobs)
    return torch.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)


def _plain_kl(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    return kl_estimate(logprobs, reference, kind, weight=None, input_clamp=None, output_clamp=None)


def _js_divergence(old: Tensor, generation: Tensor) -> Tensor:
    """Return .5 f(old) + .5 f(generation), f(a) = exp(a - m) - (a - m) - 1, m = log of the two's mean probability."""
    mixture = torch.logaddexp(old, generation) - math.log(2)
    sides = torch.stack([old - mixture, generation - mixture])
    return (torch.expm1(sides) - sides).mean(dim=0)


def _token_sum(tokens: _Tokens, values: Tensor) -> Metric:
    return Metric((tokens.weights * values).sum(dtype=torch.float64).item(), Per.TOKENS)


def _extremum(values: Tensor, per: Per) -> Metric:
    if values.numel() == 0:
        return Metric(math.inf if per is Per.MIN else -math.inf, per)
    return Metric((values.min() if per is Per.MIN else values.max()).item(), per)


def _logprob_gap(tokens: _Tokens, batch: TrainBatch, index: Tensor) -> dict[str, Metric]:
    """Return the largest |trainer - generator| over tokens that the version in training sampled: there both are equal
    but for rounding, so this watches the whole of refit, sampler and masks. Absent when there is no such token.
    A gap that is no number counts apart."""
    if batch.policy_version is None:
        return {}
    is_own = batch.token_versions[index] == batch.policy_version
    if not bool(is_own.any()):
        return {}
    gaps = (tokens.prev_logprobs - tokens.generation_logprobs).abs()[is_own]
    finite = gaps[torch.isfinite(gaps)]
    # A maximum drops NaN on its way through micro-batches and ranks, a count does not.
    broken = {"num_nonfinite_logprob_gaps": Metric(float(gaps.numel() - finite.numel()), Per.NONE)}
    return broken | ({"max_logprob_diff": Metric(finite.max().item(), Per.MAX)} if finite.numel() else {})
