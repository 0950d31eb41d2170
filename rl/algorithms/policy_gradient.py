"""The one policy-gradient loss, composed of the parts that papers exchange.

Per counted token, with advantage A, ratio r, surrogate l(A, r), generator weight w and entropy H,

    L = reduce(w l + beta KL - entropy_coef H) + nll_weight (1 / N_pos) sum_positive(-logprob)

where `reduce` is a mean over tokens or sequences, and N_pos counts the tokens of all sequences of the optimizer step
whose reward is positive (VAPO: Yue et al. 2025, equation 13). The parts are built from YAML by
`rl.algorithms.objective`. Advantages come with the batch; nothing here divides by a global count.

    loss = parse_objective(config.loss_fn, single_update=True)
    sums = loss(logprobs, entropy, batch)
    sums.loss.backward()
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums, NativeLoss
from rl.algorithms.corrections import Level, Truncated, generator_weights
from rl.algorithms.counted_tokens import CountedTokens
from rl.algorithms.kl_term import KlPlace, KlTerm, reference_column
from rl.algorithms.native_loss import native_form
from rl.algorithms.policy_metrics import generator_metrics, logprob_gap, ratio_metrics
from rl.algorithms.reduction import Reduction, positive_counts
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per


class Ratio(Protocol):
    """What the advantage multiplies."""

    def factor(self, tokens: CountedTokens) -> Tensor:
        """Return it, [K] with gradient."""
        ...

    def observed(self, tokens: CountedTokens) -> Tensor:
        """Return the ratio that metrics report, [K] without gradient."""
        ...


class Surrogate(Protocol):
    """How advantage and ratio make a loss."""

    def clamp(self, ratios: Tensor) -> Tensor:
        """Return what the bounds leave of the ratios."""
        ...

    def losses(self, factor: Tensor, tokens: CountedTokens) -> Tensor:
        """Return the loss of each token, [K]."""
        ...

    def binding(self, ratios: Tensor, advantages: Tensor) -> Mapping[str, Tensor]:
        """Say for each token which bound acts, [K] bool by metric name."""
        ...


class Correction(Protocol):
    """How the weights for the generator's distance act."""

    @property
    def level(self) -> Level:
        """Whether tokens or sequences have a weight."""
        ...

    @property
    def applies(self) -> bool:
        """Whether the weights multiply the loss."""
        ...

    def truncate(self, weights: Tensor, tokens: CountedTokens) -> Truncated:
        """Return the weights that remain."""
        ...


@dataclass(frozen=True)
class PolicyGradientLoss:
    """The loss.

    Attributes:
        ratio: Token ratio, sequence ratio, none, or 1.
        surrogate: Clipped, CISPO, or neither.
        correction: Weights of tokens that another engine or an older policy sampled.
        kl: The penalty against the reference.
        reduction: Mean over tokens or over sequences.
        entropy_coef: Weight of the entropy bonus.
        nll_weight: Weight of the log-likelihood of sequences with a positive reward.
        single_update: Whether one optimizer step consumes the whole batch. Then the policy in the loss is the one at
            the start of the step, and a missing column prev_logprobs is `logprobs` without gradient.
    """

    ratio: Ratio
    surrogate: Surrogate
    correction: Correction
    kl: KlTerm
    reduction: Reduction
    entropy_coef: float
    nll_weight: float
    single_update: bool

    @property
    def uses_prev(self) -> bool:
        """Whether the column prev_logprobs must be computed for this objective."""
        return not self.single_update or self.kl.where is KlPlace.REWARD

    @property
    def uses_reference(self) -> bool:
        """Whether the column reference_logprobs must be computed for this objective."""
        return self.kl.where is not KlPlace.OFF

    @property
    def uses_entropy(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.entropy_coef > 0

    def contributes(self, batch: TrainBatch) -> Tensor:
        """Return [N] bool: sequences with weight, unless only advantages matter and theirs are all 0."""
        counted = batch.token_weights > 0
        if batch.advantages is not None and self.kl.where is not KlPlace.LOSS and not self.uses_entropy:
            learns = batch.advantages != 0
            if self.nll_weight > 0:
                learns = learns | (batch.rewards > 0)[batch.sequence_ids]
            counted = counted & learns
        owners = batch.sequence_ids[counted]
        return torch.bincount(owners, minlength=batch.num_sequences) > 0

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        """Return the sums of one micro-batch.

        Args:
            logprobs: [T] float with gradient; the loss has its dtype.
            entropy: [T] float; with gradient when `uses_entropy`.
            batch: With `advantages`; with `prev_logprobs` unless `single_update`; with `reference_logprobs` when
                `uses_reference`; with `counts` when `nll_weight` > 0.

        Raises:
            ValueError: a needed column, or the counts, are missing.
        """
        tokens = CountedTokens.of(batch, logprobs, needs_prev=not self.single_update)
        shares, per = self.reduction.shares(tokens), self.reduction.per
        correction = self.correction.truncate(generator_weights(tokens, self.correction.level), tokens)
        losses = self.surrogate.losses(self.ratio.factor(tokens), tokens)
        if self.correction.applies:
            losses = self._by_token(correction.weights, tokens) * losses
        loss = (shares * losses).sum()
        entropies = entropy[tokens.index].to(loss.dtype)
        if self.uses_entropy:
            loss = loss - self.entropy_coef * (shares * entropies).sum()
        metrics = {"kl_penalty": Metric(0.0, per)}
        if self.uses_reference:
            kl = (shares * self.kl.estimates(tokens, reference_column(batch))).sum()
            metrics["kl_penalty"] = Metric(kl.item(), per)
            if self.kl.where is KlPlace.LOSS:
                loss = loss + self.kl.beta * kl
        if self.nll_weight > 0:
            nll, metrics["positive_nll_loss"] = self._positive_nll(tokens, batch)
            loss = loss + self.nll_weight * nll
        metrics["loss"] = Metric(loss.item(), per)
        with torch.no_grad():
            metrics |= self._observations(tokens, correction, batch)
            metrics["entropy"] = tokens.per_token(entropies)
        return LossSums(loss, per, metrics)

    def native(self) -> NativeLoss | str:
        """Return the native form, or why there is none."""
        if type(self) is not PolicyGradientLoss:
            return f"{type(self).__name__} changes the policy-gradient loss"
        return native_form(self)

    def _by_token(self, weights: Tensor, tokens: CountedTokens) -> Tensor:
        return weights if self.correction.level is Level.TOKEN else weights[tokens.owners]

    def _positive_nll(self, tokens: CountedTokens, batch: TrainBatch) -> tuple[Tensor, Metric]:
        """Return the sum that becomes the term once divided like the rest of the loss, and the term as a metric."""
        counts = positive_counts(batch)
        is_positive = (batch.rewards > 0)[tokens.owners]
        total = (tokens.weights * -tokens.logprobs)[is_positive].sum()
        if counts.positive_tokens == 0:
            return total, Metric(0.0, Per.NONE)
        mean = total / counts.positive_tokens
        return mean * self.reduction.denominator(counts), Metric(mean.item(), Per.NONE)

    def _observations(self, tokens: CountedTokens, correction: Truncated, batch: TrainBatch) -> dict[str, Metric]:
        ratios = self.ratio.observed(tokens)
        metrics = ratio_metrics(tokens, ratios, self.surrogate.clamp(ratios))
        for name, binds in self.surrogate.binding(ratios, tokens.advantages).items():
            metrics[name] = tokens.per_token(binds.to(ratios.dtype))
        metrics |= generator_metrics(tokens, self.kl.kind)
        by_sequence = self.correction.level is Level.SEQUENCE
        weigh = tokens.per_sequence if by_sequence else tokens.per_token
        metrics["sampling_importance_ratio"] = weigh(correction.weights)
        if correction.is_outside is not None:
            metrics["is_oob_ratio"] = correction.is_outside
        metrics["num_clamped_log_ratios"] = Metric(float(tokens.num_clamped_log_ratios()), Per.NONE)
        metrics |= logprob_gap(tokens, batch)
        metrics["num_valid_samples"] = Metric(batch.sample_weights.sum().item(), Per.NONE)
        return metrics
