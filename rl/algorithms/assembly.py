"""Puts an algorithm together: objective, estimator, reward pipeline and filters, each from its part of the YAML.

It holds no formula; those stand in the files of their papers.

    algorithm = build_algorithm(config.grpo, config.loss_fn, single_update=True)
    batch, metrics = algorithm.shape(batch)
    ...                                             # fill the columns of algorithm.needs
    batch, metrics = algorithm.filter(batch)
    batch = batch.with_columns(**algorithm.advantages(batch))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.advantages import shuffle
from rl.algorithms.algorithm import Algorithm, Estimator, LossFunction, Need, Staged
from rl.algorithms.config import (
    DrGRPOConfig,
    GDPOConfig,
    GroupRelativeConfig,
    GRPOConfig,
    LossConfig,
    RawRewardConfig,
    ReinforcePlusPlusConfig,
    RewardPenaltiesConfig,
    RLOOConfig,
)
from rl.algorithms.dr_grpo import DrGRPO
from rl.algorithms.filters import drop_by_logprob_error, drop_truncated
from rl.algorithms.gdpo import GDPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.kl_in_reward import RewardKl
from rl.algorithms.objective import parse_objective
from rl.algorithms.overrides import clip_advantages, override_turns
from rl.algorithms.policy_gradient import PolicyGradientLoss
from rl.algorithms.raw_reward import RawReward
from rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rl.algorithms.rewards import RewardTransform, apply_transforms, reward_transforms
from rl.algorithms.rloo import RLOO
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class PolicyGradient:
    """An algorithm of the GRPO family.

    Attributes:
        config: The `grpo` section.
        loss: The objective.
        estimator: Rewards to advantages.
        transforms: The reward pipeline.
    """

    config: GRPOConfig
    loss: PolicyGradientLoss
    estimator: Estimator
    transforms: Sequence[RewardTransform]

    @property
    def needs(self) -> frozenset[Need]:
        """PREV when several updates share a batch or its log-probabilities are looked at; REFERENCE for a KL term."""
        needs = set(self.estimator.needs)
        if self.loss.uses_prev or self.config.seq_logprob_error_threshold is not None:
            needs.add(Need.PREV)
        if self.loss.uses_reference:
            needs.add(Need.REFERENCE)
        return frozenset(needs)

    @property
    def losses(self) -> Mapping[str, LossFunction]:
        """One model is trained: the policy."""
        return {"policy": self.loss}

    def shape(self, batch: TrainBatch) -> Staged:
        """Apply the reward pipeline, then the overlong filter."""
        batch, metrics = apply_transforms(self.transforms, batch)
        if self.config.overlong_filtering:
            batch, told = drop_truncated(batch)
            metrics |= told
        return batch, metrics

    def filter(self, batch: TrainBatch) -> Staged:
        """Drop sequences whose generator and trainer disagree."""
        return drop_by_logprob_error(batch, self.config.seq_logprob_error_threshold)

    def advantages(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return the estimator's columns, flagged turns overridden and advantages clipped.

        The control experiment shuffles what the overrides leave: they would teach something otherwise.
        """
        columns = self.estimator(batch)
        advantages = override_turns(
            columns["advantages"],
            batch,
            invalid_tool_call=self.config.invalid_tool_call_advantage,
            malformed_thinking=self.config.malformed_thinking_advantage,
        )
        if self.config.shuffle_advantages:
            advantages = shuffle(advantages, batch, self.config.seed)
        clipped = clip_advantages(advantages, self.config.advantage_clip_low, self.config.advantage_clip_high)
        return columns | {"advantages": clipped}


def build_algorithm(
    grpo: GRPOConfig,
    loss: LossConfig,
    single_update: bool,
    penalties: RewardPenaltiesConfig | None = None,
) -> Algorithm:
    """Build the algorithm.

    Args:
        grpo: The `grpo` section.
        loss: The `loss_fn` section.
        single_update: Whether one optimizer step consumes the whole batch. Then the policy at the start of the step is
            the one in the loss, and its log-probabilities need no pass of their own.
        penalties: The `reward_penalties` section; None = its defaults.

    Raises:
        ConfigError: the loss forces an on-policy ratio but the batch is used for several optimizer steps, or reward
            shaping lacks a setting.
    """
    transforms = reward_transforms(grpo, RewardPenaltiesConfig() if penalties is None else penalties)
    return PolicyGradient(grpo, parse_objective(loss, single_update), build_estimator(grpo, loss), transforms)


def build_estimator(grpo: GRPOConfig, loss: LossConfig) -> Estimator:
    """Build the estimator that `grpo.adv_estimator` names."""
    leave_one_out, normalize = grpo.use_leave_one_out_baseline, grpo.normalize_rewards
    match grpo.adv_estimator:
        case GroupRelativeConfig():
            return GRPO(leave_one_out, normalize)
        case RLOOConfig():
            return RLOO()
        case DrGRPOConfig():
            return DrGRPO()
        case ReinforcePlusPlusConfig(minus_baseline=minus_baseline):
            return ReinforcePlusPlus(minus_baseline, RewardKl.from_config(loss))
        case GDPOConfig(reward_weights=weights):
            return GDPO(weights, leave_one_out, normalize)
        case RawRewardConfig(whiten=whiten):
            return RawReward(whiten)
