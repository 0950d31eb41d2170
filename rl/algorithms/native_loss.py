"""The policy-gradient loss in the form of csrc/loss/policy_loss.h: its parameters, its columns, and its metrics' names.

A table of what corresponds to what. What the native form cannot express (parts of another kind, a mask over whole
sequences) is said in words, and the torch form of `rl.algorithms.policy_gradient` is then used. No formula is here.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.algorithms.cispo import Cispo
from rl.algorithms.corrections import IcePop, Level, Off, Raw, Tis
from rl.algorithms.counted_tokens import CountedTokens
from rl.algorithms.gspo import SequenceRatio
from rl.algorithms.kl_term import KlPlace, KlTerm, reference_column
from rl.algorithms.policy_metrics import logprob_gap
from rl.algorithms.ppo import Clip, TokenRatio
from rl.algorithms.reduction import Reduction, positive_counts
from rl.algorithms.reinforce import NoRatio, OnPolicyRatio, Unclipped
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.ops.policy_loss import (
    CorrectionKind,
    PolicyLossParams,
    PolicyLossTokens,
    PolicyMetric,
    RatioKind,
    SurrogateKind,
    name_metrics,
)

_RATIOS: dict[type, RatioKind] = {
    TokenRatio: RatioKind.TOKEN,
    OnPolicyRatio: RatioKind.ON_POLICY,
    NoRatio: RatioKind.NONE,
    SequenceRatio: RatioKind.SEQUENCE,
}
_SURROGATES: dict[type, SurrogateKind] = {
    Clip: SurrogateKind.CLIP,
    Cispo: SurrogateKind.CISPO,
    Unclipped: SurrogateKind.UNCLIPPED,
}
_CORRECTIONS: dict[type, CorrectionKind] = {
    Off: CorrectionKind.OFF,
    Raw: CorrectionKind.RAW,
    Tis: CorrectionKind.TIS,
    IcePop: CorrectionKind.ICEPOP,
}
_TOKEN_MEANS = {
    "probs_ratio": PolicyMetric.RATIO,
    "probs_ratio_clamped": PolicyMetric.RATIO_CLAMPED,
    "clipfrac_low": PolicyMetric.CLIP_LOW,
    "clipfrac_high": PolicyMetric.CLIP_HIGH,
    "dual_clipfrac": PolicyMetric.DUAL_CLIP,
    "token_mult_prob_error": PolicyMetric.MULT_PROB_ERROR,
    "gen_kl_error": PolicyMetric.GENERATION_KL,
    "policy_kl_error": PolicyMetric.POLICY_KL,
    "js_divergence_error": PolicyMetric.JS_DIVERGENCE,
    "approx_entropy": PolicyMetric.APPROX_ENTROPY,
    "entropy": PolicyMetric.ENTROPY,
}
_EXTREMA = {
    "probs_ratio_min": (PolicyMetric.RATIO_MIN, Per.MIN),
    "probs_ratio_max": (PolicyMetric.RATIO_MAX, Per.MAX),
    "probs_ratio_clamped_min": (PolicyMetric.RATIO_CLAMPED_MIN, Per.MIN),
    "probs_ratio_clamped_max": (PolicyMetric.RATIO_CLAMPED_MAX, Per.MAX),
}


class Objective(Protocol):
    """The parts of a policy-gradient loss, as `rl.algorithms.policy_gradient` names them."""

    @property
    def ratio(self) -> object:
        """What the advantage multiplies."""
        ...

    @property
    def surrogate(self) -> object:
        """How advantage and ratio make a loss."""
        ...

    @property
    def correction(self) -> object:
        """What becomes of the weights for the generator's distance."""
        ...

    @property
    def kl(self) -> KlTerm:
        """The penalty against the reference."""
        ...

    @property
    def reduction(self) -> Reduction:
        """Mean over tokens or over sequences."""
        ...

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        ...

    @property
    def nll_weight(self) -> float:
        """Weight of the log-likelihood of sequences with a positive reward."""
        ...

    @property
    def single_update(self) -> bool:
        """Whether a missing column prev_logprobs is `logprobs` without gradient."""
        ...


@dataclass(frozen=True)
class NativePolicyLoss:
    """A `rl.algorithms.algorithm.NativeLoss`.

    Attributes:
        objective: Its parts.
        params: The same for the operator.
    """

    objective: Objective
    params: PolicyLossParams

    def tokens(self, batch: TrainBatch) -> PolicyLossTokens:
        """Return the columns of the tokens with weight.

        Raises:
            ValueError: a needed column, or the counts, are missing.
        """
        objective = self.objective
        # The log-probabilities come with the pass; no column depends on them.
        taken = CountedTokens.of(batch, torch.zeros(batch.num_tokens), needs_prev=not objective.single_update)
        has_reference = objective.kl.where is not KlPlace.OFF
        by_sequence = self.params.ratio is RatioKind.SEQUENCE
        return PolicyLossTokens(
            generation_logprobs=taken.generation_logprobs,
            advantages=taken.advantages,
            shares=objective.reduction.shares(taken),
            weights=taken.weights,
            prev_logprobs=None if batch.prev_logprobs is None else taken.prev_logprobs,
            reference_logprobs=reference_column(batch)[taken.index] if has_reference else None,
            nll_coefs=self._nll_coefs(taken, batch) if objective.nll_weight > 0 else None,
            sequence_offsets=_offsets(taken.lengths) if by_sequence else None,
            sequence_weights=taken.sequence_weights if by_sequence else None,
        )

    def sums(self, metrics: Tensor, logprobs: Tensor, batch: TrainBatch) -> LossSums:
        """Return the sums of one micro-batch, without graph."""
        values, per = name_metrics(metrics), self.objective.reduction.per
        by_sequence = self.params.ratio is RatioKind.SEQUENCE
        named = {name: Metric(values[key], Per.TOKENS) for name, key in _TOKEN_MEANS.items()}
        named |= {
            name: Metric(values[key], kind) for name, (key, kind) in _EXTREMA.items() if not math.isinf(values[key])
        }
        named["loss"] = Metric(values[PolicyMetric.LOSS], per)
        named["kl_penalty"] = Metric(values[PolicyMetric.KL_PENALTY], per)
        named["sampling_importance_ratio"] = Metric(
            values[PolicyMetric.CORRECTION], Per.SEQUENCES if by_sequence else Per.TOKENS
        )
        if self.params.correction in (CorrectionKind.TIS, CorrectionKind.ICEPOP):
            named["is_oob_ratio"] = Metric(values[PolicyMetric.OUTSIDE], Per.TOKENS)
        if self.objective.nll_weight > 0:
            factor = self.objective.nll_weight * self.objective.reduction.denominator(positive_counts(batch))
            named["positive_nll_loss"] = Metric(values[PolicyMetric.NLL] / factor if factor else 0.0, Per.NONE)
        named["num_clamped_log_ratios"] = Metric(values[PolicyMetric.CLAMPED_LOG_RATIOS], Per.NONE)
        named["num_valid_samples"] = Metric(batch.sample_weights.sum().item(), Per.NONE)
        taken = CountedTokens.of(batch, logprobs.detach(), needs_prev=not self.objective.single_update)
        named |= logprob_gap(taken, batch)
        return LossSums(torch.tensor(values[PolicyMetric.LOSS]), per, named)

    def _nll_coefs(self, taken: CountedTokens, batch: TrainBatch) -> Tensor:
        counts = positive_counts(batch)
        if counts.positive_tokens == 0:
            return torch.zeros_like(taken.weights)
        factor = self.objective.nll_weight * self.objective.reduction.denominator(counts) / counts.positive_tokens
        return factor * torch.where((batch.rewards > 0)[taken.owners], taken.weights, torch.zeros_like(taken.weights))


def native_form(objective: Objective) -> NativePolicyLoss | str:
    """Return the native form of a loss, or why there is none, as a clause."""
    bounds, weights, kl = objective.surrogate, objective.correction, objective.kl
    for part, known in ((objective.ratio, _RATIOS), (bounds, _SURROGATES), (weights, _CORRECTIONS)):
        if type(part) not in known:
            return f"{type(part).__name__} has no native form"
    ratio = _RATIOS[type(objective.ratio)]
    weighs_sequences = isinstance(weights, Off | Raw | Tis | IcePop) and weights.level is Level.SEQUENCE
    if weighs_sequences != (ratio is RatioKind.SEQUENCE):
        return "only one of ratios and generator weights is per sequence"
    low, high = (bounds.low, bounds.high) if isinstance(bounds, Clip | Cispo) else (0.0, 0.0)
    least, most = (weights.low, weights.high) if isinstance(weights, Tis | IcePop) else (0.0, math.inf)
    params = PolicyLossParams(
        ratio=ratio,
        surrogate=_SURROGATES[type(bounds)],
        clip_low=low,
        clip_high=high,
        dual_clip=bounds.dual if isinstance(bounds, Clip) else None,
        correction=_CORRECTIONS[type(weights)],
        correction_low=least,
        correction_high=most,
        kl=kl.kind,
        kl_coef=kl.beta if kl.where is KlPlace.LOSS else 0.0,
        kl_importance_weight=kl.on_policy_weight,
        kl_input_clamp=kl.input_clamp,
        kl_output_clamp=kl.output_clamp,
        entropy_coef=objective.entropy_coef,
    )
    return NativePolicyLoss(objective, params)


def _offsets(lengths: Tensor) -> Tensor:
    """Return where each sequence's tokens begin, and where the last one's end."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.to(torch.int64).cumsum(0)])
