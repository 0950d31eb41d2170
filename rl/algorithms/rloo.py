"""RLOO (Ahmadian et al. 2024, "Back to Basics"), the leave-one-out estimator.

    A_i = r_i - mean of the rewards of the other rollouts of the prompt

Nothing is divided by: an easy prompt and a hard one weigh as much as their rewards differ.

In YAML:
    grpo: {adv_estimator: {name: rloo}}
    loss_fn: {disable_ppo_ratio: true}      # the paper's REINFORCE surrogate; leave out for the clipped one
"""

from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.advantages import by_rollout, group_advantages, spread
from rl.algorithms.algorithm import Need
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class RLOO:
    """The estimator."""

    needs: frozenset[Need] = frozenset()

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}."""
        rollouts = by_rollout(batch)
        values = group_advantages(
            rollouts.rewards, rollouts.valid, rollouts.group_ids, leave_one_out=True, normalize=False
        )
        return {"advantages": spread(values, rollouts, batch)}
