"""REINFORCE (Williams 1992) without a baseline, the estimator: the reward itself is the advantage.

    A_{i,t} = r_i, optionally whitened over all sampled tokens of the step

In YAML:
    grpo: {adv_estimator: {name: raw_reward, whiten: true}}
    loss_fn: {disable_ppo_ratio: true}
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.advantages import by_rollout, spread, voting_tokens
from rl.algorithms.algorithm import Need
from rl.algorithms.whitening import whiten_biased
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class RawReward:
    """The estimator.

    Attributes:
        whiten: Whether to whiten over the step's tokens.
    """

    whiten: bool
    needs: frozenset[Need] = frozenset()

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}."""
        rollouts = by_rollout(batch)
        by_token = spread(torch.where(rollouts.valid, rollouts.rewards, 0.0), rollouts, batch)
        return {"advantages": whiten_biased(by_token, voting_tokens(batch)) if self.whiten else by_token}
