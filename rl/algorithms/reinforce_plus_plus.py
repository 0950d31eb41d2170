"""REINFORCE++ and REINFORCE++-baseline (Hu 2025, "REINFORCE++"), the estimator.

    a_{i,t} = r_i [- mean of its group]  - beta k_{i,t}
    A_{i,t} = (a_{i,t} - mean) / std, mean and std over all sampled tokens of the step

The normalisation is global rather than by group, so a prompt with little variance is not blown up; -baseline subtracts
the group's mean before it. The KL term is the paper's: in the reward, not in the loss.

In YAML:
    grpo: {adv_estimator: {name: reinforce_plus_plus, minus_baseline: true}}
    loss_fn: {use_kl_in_reward: true, reference_policy_kl_penalty: 0.001, reference_policy_kl_type: k2}
"""

from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.advantages import by_rollout, group_advantages, spread, voting_tokens
from rl.algorithms.algorithm import Need
from rl.algorithms.kl_in_reward import KL_NEEDS, RewardKl
from rl.algorithms.whitening import whiten_biased
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """The estimator.

    Attributes:
        minus_baseline: Subtract the group's mean first.
        kl: What each token is charged, or None.
    """

    minus_baseline: bool
    kl: RewardKl | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Both sides of the KL, where there is one."""
        return frozenset() if self.kl is None else KL_NEEDS

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}."""
        rollouts = by_rollout(batch)
        values = rollouts.rewards
        if self.minus_baseline:
            values = group_advantages(values, rollouts.valid, rollouts.group_ids, leave_one_out=False, normalize=False)
        by_token = spread(values, rollouts, batch)
        if self.kl is not None:
            by_token = by_token - self.kl(batch)
        return {"advantages": whiten_biased(by_token, voting_tokens(batch))}
