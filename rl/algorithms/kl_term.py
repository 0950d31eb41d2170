"""The KL penalty of an objective: how it is estimated, how much it weighs, and where it stands.

In the loss, each estimate carries a weight (see `rl.ops.kl`) so that its expected gradient is that of the divergence.
In the reward, it is subtracted by the advantage estimator, and the loss only reports it.

YAML: `reference_policy_kl_penalty` (beta; 0 = off), `reference_policy_kl_type`, `kl_input_clamp_value`,
`kl_output_clamp_value`, `use_on_policy_kl_approximation`, `use_kl_in_reward`.
"""

import enum
from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens
from rl.core.batch import TrainBatch
from rl.ops.kl import KlEstimator, importance_weight, kl_estimate, score_function_weight


class KlPlace(enum.Enum):
    """Where the penalty stands."""

    OFF = "off"
    LOSS = "loss"
    REWARD = "reward"


def reference_column(batch: TrainBatch) -> Tensor:
    """Return the log-probabilities of the reference, [T].

    Raises:
        ValueError: the batch has none.
    """
    if batch.reference_logprobs is None:
        raise ValueError("loss_fn.reference_policy_kl_penalty > 0 needs the column reference_logprobs")
    return batch.reference_logprobs


@dataclass(frozen=True)
class KlTerm:
    """beta KL(policy || reference), estimated per token.

    Attributes:
        where: In the loss, in the reward, or nowhere.
        kind: The estimator; also that of the metrics which compare trainer and generator.
        beta: Its factor.
        input_clamp: Bound of the log-ratio, or None.
        output_clamp: Bound of the estimate, or None.
        on_policy_weight: Weight estimates by p / p_generation instead of by 1.
    """

    where: KlPlace
    kind: KlEstimator
    beta: float
    input_clamp: float | None
    output_clamp: float | None
    on_policy_weight: bool

    def estimates(self, tokens: CountedTokens, reference_logprobs: Tensor) -> Tensor:
        """Return the estimate of each token, beta left out.

        Args:
            tokens: the K tokens.
            reference_logprobs: [T] of the micro-batch.
        """
        if self.on_policy_weight:
            weight = importance_weight(tokens.logprobs, tokens.generation_logprobs)
        else:
            weight = score_function_weight(tokens.logprobs)
        return kl_estimate(
            tokens.logprobs,
            reference_logprobs[tokens.index].to(tokens.logprobs.dtype),
            self.kind,
            weight=weight,
            input_clamp=self.input_clamp,
            output_clamp=self.output_clamp,
        )
