"""The tokens of a micro-batch that count, taken out before any formula sees them.

Whatever stands in other places (NaN included) reaches neither value nor gradient. Formulas work on these [K] columns;
sums per sequence and weighted sums for metrics are here, ratios and losses are not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per

# A ratio of exp(20) = 5e8 is a fault or a policy that has run away, and far outside every bound.
LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True)
class CountedTokens:
    """K tokens with weight, of N sequences; float columns have the dtype of `logprobs`.

    Attributes:
        index: [K] int64, their places in the micro-batch.
        owners: [K] int64, the sequence of each.
        weights: [K], weight of each in loss and counts.
        lengths: [N], number of tokens of each sequence that count; 0 where the sequence has no weight.
        sequence_weights: [N].
        logprobs: [K], of the trained policy; with gradient.
        prev_logprobs: [K], of the trained policy at the start of the step; without gradient.
        generation_logprobs: [K], of the generator.
        advantages: [K].
    """

    index: Tensor
    owners: Tensor
    weights: Tensor
    lengths: Tensor
    sequence_weights: Tensor
    logprobs: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, logprobs: Tensor, *, needs_prev: bool) -> "CountedTokens":
        """Take them from a micro-batch.

        Args:
            batch: With `advantages`; without `prev_logprobs` the policy is at the start of its step, and those are
                `logprobs` without gradient.
            logprobs: [T] float, of the trained policy.
            needs_prev: Whether that shortcut is wrong, because the policy has moved since.

        Raises:
            ValueError: a needed column is missing.
        """
        if batch.advantages is None:
            raise ValueError("the policy-gradient loss needs the column advantages")
        if needs_prev and batch.prev_logprobs is None:
            raise ValueError("several optimizer steps per batch need the column prev_logprobs")
        token_weights, sequence_ids = batch.token_weights, batch.sequence_ids
        index = (token_weights > 0).nonzero().squeeze(1)
        owners, taken = sequence_ids[index], logprobs[index]
        prev = taken.detach() if batch.prev_logprobs is None else batch.prev_logprobs[index].to(taken.dtype)
        return cls(
            index=index,
            owners=owners,
            weights=token_weights[index].to(taken.dtype),
            lengths=torch.bincount(owners, minlength=batch.num_sequences).to(taken.dtype),
            sequence_weights=batch.sample_weights.to(taken.dtype),
            logprobs=taken,
            prev_logprobs=prev,
            generation_logprobs=batch.generation_logprobs[index].to(taken.dtype),
            advantages=batch.advantages[index].to(taken.dtype),
        )

    def log_ratios(self) -> Tensor:
        """Return log(p / p_prev), [K] with gradient, within +-LOG_RATIO_CLAMP; no gradient flows from beyond it.

        The exponential of what lies beyond would be infinite soon, and its gradient no number. What is no number stays
        so, in value and gradient, and the optimizer will not step on it.
        """
        log_ratios = self.logprobs - self.prev_logprobs
        is_beyond = log_ratios.abs() > LOG_RATIO_CLAMP
        # A clamp of the whole would give NaN the gradient 0.
        return torch.where(is_beyond, log_ratios.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), log_ratios)

    def num_clamped_log_ratios(self) -> int:
        """Return how many of the tokens `log_ratios` changes."""
        return int(((self.logprobs.detach() - self.prev_logprobs).abs() > LOG_RATIO_CLAMP).sum())

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum [K] values over each sequence, [N]; 0 for a sequence without tokens."""
        return values.new_zeros(self.lengths.shape).index_add(0, self.owners, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average [K] values over each sequence, [N]; 0 for a sequence without tokens."""
        return self.sequence_sum(values) / self.lengths.clamp(min=1)

    def per_token(self, values: Tensor) -> Metric:
        """Return the weighted sum of [K] values, to be divided by the number of tokens."""
        return Metric((self.weights * values).sum(dtype=torch.float64).item(), Per.TOKENS)

    def per_sequence(self, values: Tensor) -> Metric:
        """Return the weighted sum of [N] values, to be divided by the number of sequences."""
        return Metric((self.sequence_weights * values).sum(dtype=torch.float64).item(), Per.SEQUENCES)
