"""Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", section 4.1.2), the estimator.

    A_i = (r_i - mean(r)) / std(r), over the rewards of the rollouts of one prompt

A prompt is answered several times; each answer is judged relative to its siblings, which takes the place of a critic.
With `use_leave_one_out_baseline` the baseline is the mean of the *other* siblings, which makes A larger by n / (n - 1);
the standard deviation stays the group's, so advantages sum to 0 either way.

In YAML (these are the defaults):
    grpo: {normalize_rewards: true, use_leave_one_out_baseline: true, adv_estimator: {name: grpo}}
    loss_fn: {reference_policy_kl_penalty: 0.01}      # KL in the loss, as in the paper
"""

from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.advantages import by_rollout, group_advantages, spread
from rl.algorithms.algorithm import Need
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class GRPO:
    """The estimator.

    Attributes:
        leave_one_out: Whether the baseline is the mean of the siblings rather than of the whole group.
        normalize: Whether to divide by the group's standard deviation.
    """

    leave_one_out: bool = True
    normalize: bool = True
    needs: frozenset[Need] = frozenset()

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}."""
        rollouts = by_rollout(batch)
        values = group_advantages(
            rollouts.rewards,
            rollouts.valid,
            rollouts.group_ids,
            leave_one_out=self.leave_one_out,
            normalize=self.normalize,
        )
        return {"advantages": spread(values, rollouts, batch)}
