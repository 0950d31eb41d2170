"""From per-token losses to one sum, and what divides it.

    token level      L = (1 / N_tok) sum_t w_t l_t                      (DAPO: Yu et al. 2025, equation 8)
    sequence level   L = (1 / N_seq) sum_b w_b mean_t l_bt              (GRPO: Shao et al. 2024, equation 3)
    constant         L = (1 / N_seq) sum_b w_b (sum_t l_bt) / divisor   (Dr. GRPO: Liu et al. 2025, section 3.2)

N_tok and N_seq are counts of the whole optimizer step; the division by them is the trainer's.
YAML: `token_level_loss: true`, `token_level_loss: false`, `token_level_loss: false` with `sequence_loss_divisor`.
"""

from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens
from rl.core.batch import TrainBatch
from rl.core.metrics import Counts, Per


@dataclass(frozen=True)
class Reduction:
    """Which share of the sum each token has.

    Attributes:
        per: The count that divides the sum: TOKENS or SEQUENCES.
        divisor: What the sum of a sequence's tokens is divided by, instead of by their number; None with TOKENS.
    """

    per: Per
    divisor: int | None = None

    def shares(self, tokens: CountedTokens) -> Tensor:
        """Return the factor of each token's loss in the sum, [K]."""
        if self.per is Per.TOKENS:
            return tokens.weights
        weights = tokens.sequence_weights[tokens.owners]
        return weights / (tokens.lengths[tokens.owners] if self.divisor is None else self.divisor)

    def denominator(self, counts: Counts) -> float:
        """Return the count that divides the sum."""
        return counts.tokens if self.per is Per.TOKENS else counts.sequences


def positive_counts(batch: TrainBatch) -> Counts:
    """Return the counts of the whole optimizer step, for a term that divides by its positive tokens.

    Raises:
        ValueError: the batch carries none.
    """
    if batch.counts is None:
        raise ValueError(
            "loss_fn.positive_example_nll_weight > 0 divides by the positive tokens of the whole optimizer step, "
            "but the batch carries no counts; set them with TrainBatch.with_counts(whole_step.count())"
        )
    return batch.counts


TOKENS = Reduction(Per.TOKENS)
SEQUENCES = Reduction(Per.SEQUENCES)


def constant(divisor: int) -> Reduction:
    """Return Dr. GRPO's reduction: no sequence's weight depends on its length."""
    return Reduction(Per.SEQUENCES, divisor)
