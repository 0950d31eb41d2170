"""Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3), the estimator.

    A_i = r_i - mean of the rewards of all rollouts of the prompt

GRPO without its two biases: no division by the group's standard deviation, which favours prompts that are almost always
or almost never solved; and, in the loss, no division by a response's own length, which favours long wrong answers.

In YAML:
    grpo: {adv_estimator: {name: dr_grpo}}
    loss_fn: {token_level_loss: false, sequence_loss_divisor: 512}      # a constant: the longest response
"""

from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.advantages import by_rollout, group_advantages, spread
from rl.algorithms.algorithm import Need
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class DrGRPO:
    """The estimator."""

    needs: frozenset[Need] = frozenset()

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}."""
        rollouts = by_rollout(batch)
        values = group_advantages(
            rollouts.rewards, rollouts.valid, rollouts.group_ids, leave_one_out=False, normalize=False
        )
        return {"advantages": spread(values, rollouts, batch)}
