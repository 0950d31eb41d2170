"""The KL penalty as a part of each token's reward, where the loss has none (Ouyang et al. 2022, equation 2).

In YAML: `loss_fn: {use_kl_in_reward: true, reference_policy_kl_penalty: 0.01}`. It compares the policy at the start of
the step with the reference, so it needs the log-probabilities of both, also where one update makes up the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.algorithm import Need
from rl.algorithms.config import LossConfig
from rl.core.batch import TrainBatch
from rl.ops.kl import KlEstimator, kl_estimate

KL_NEEDS = frozenset({Need.PREV, Need.REFERENCE})


@dataclass(frozen=True)
class RewardKl:
    """beta k(lp_prev, lp_reference) of every token.

    Attributes:
        beta: Weight.
        estimator: k1 | k2 | k3.
        input_clamp: Bound of the log-ratio, or None.
        output_clamp: Bound of the estimate, or None.
    """

    beta: float
    estimator: KlEstimator
    input_clamp: float | None
    output_clamp: float | None

    @classmethod
    def from_config(cls, loss: LossConfig) -> "RewardKl | None":
        """Return the penalty that a `loss_fn` section asks for in the reward; None where it asks for none."""
        if not loss.use_kl_in_reward or loss.reference_policy_kl_penalty == 0:
            return None
        return cls(
            loss.reference_policy_kl_penalty,
            loss.reference_policy_kl_type,
            loss.kl_input_clamp_value,
            loss.kl_output_clamp_value,
        )

    def __call__(self, batch: TrainBatch) -> Tensor:
        """Return [T] float32: what each sampled token is charged; 0 elsewhere.

        Raises:
            ValueError: the batch lacks one of the two columns.
        """
        if batch.prev_logprobs is None or batch.reference_logprobs is None:
            raise ValueError("KL in the reward needs the columns prev_logprobs and reference_logprobs")
        estimates = kl_estimate(
            batch.prev_logprobs,
            batch.reference_logprobs,
            self.estimator,
            weight=None,
            input_clamp=self.input_clamp,
            output_clamp=self.output_clamp,
        )
        return torch.where(batch.loss_mask, self.beta * estimates, 0.0)
