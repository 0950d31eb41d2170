"""The assembled algorithm: what it needs, its estimator by name, the order of its stages."""

import pickle
from typing import Any

import pytest
import torch

from rl.algorithms.algorithm import Algorithm, Need
from rl.algorithms.assembly import build_algorithm, build_estimator
from rl.algorithms.config import GRPOConfig, LossConfig, RewardPenaltiesConfig
from rl.algorithms.dr_grpo import DrGRPO
from rl.algorithms.gdpo import GDPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.kl_in_reward import RewardKl
from rl.algorithms.raw_reward import RawReward
from rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rl.algorithms.rloo import RLOO
from rl.core.batch import FLAG_BITS, TrainBatch
from rl.core.errors import ConfigError
from rl.core.types import TurnFlag
from tests.support.reward_batches import by_sequence, reward_batch
from tests.support.rollouts import random_groups

NO_KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}
KL_IN_REWARD: dict[str, Any] = {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True}
RPP = {"adv_estimator": {"name": "reinforce_plus_plus"}}


def build(
    grpo: dict[str, Any] | None = None, loss: dict[str, Any] | None = None, single_update: bool = True
) -> Algorithm:
    return build_algorithm(GRPOConfig.model_validate(grpo or {}), LossConfig(**(loss or NO_KL)), single_update)


@pytest.mark.parametrize(
    ("grpo", "loss", "single_update", "needs"),
    [
        ({}, NO_KL, True, set()),
        ({}, NO_KL, False, {Need.PREV}),
        ({}, {}, True, {Need.REFERENCE}),
        ({}, {}, False, {Need.PREV, Need.REFERENCE}),
        ({"seq_logprob_error_threshold": 2.0}, NO_KL, True, {Need.PREV}),
        (RPP, NO_KL, True, set()),
        (RPP, KL_IN_REWARD, True, {Need.PREV, Need.REFERENCE}),
    ],
)
def test_needs_follow_the_configuration(
    grpo: dict[str, Any], loss: dict[str, Any], single_update: bool, needs: set[Need]
) -> None:
    algorithm = build_algorithm(GRPOConfig.model_validate(grpo), LossConfig(**loss), single_update)
    assert algorithm.needs == needs
    assert list(algorithm.losses) == ["policy"]


@pytest.mark.parametrize(
    ("settings", "loss", "estimator"),
    [
        ({}, {}, GRPO(True, True)),
        ({"normalize_rewards": False, "use_leave_one_out_baseline": False}, {}, GRPO(False, False)),
        ({"adv_estimator": {"name": "rloo"}}, {}, RLOO()),
        ({"adv_estimator": {"name": "dr_grpo"}}, {}, DrGRPO()),
        (RPP, {}, ReinforcePlusPlus(True, None)),
        (
            {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}},
            KL_IN_REWARD,
            ReinforcePlusPlus(False, RewardKl(0.1, "k3", 20.0, 10.0)),
        ),
        (
            {"adv_estimator": {"name": "gdpo", "reward_weights": {"a": 2.0}}, "use_leave_one_out_baseline": False},
            {},
            GDPO({"a": 2.0}, False, True),
        ),
        ({"adv_estimator": {"name": "raw_reward", "whiten": True}}, {}, RawReward(True)),
    ],
)
def test_the_estimator_goes_by_name(settings: dict[str, Any], loss: dict[str, Any], estimator: object) -> None:
    assert build_estimator(GRPOConfig.model_validate(settings), LossConfig(**loss)) == estimator


def test_the_loss_can_travel_to_a_worker() -> None:
    loss = build(loss={}).losses["policy"]
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_an_on_policy_ratio_with_several_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_global_batch_size"):
        build(loss={"force_on_policy_ratio": True}, single_update=False)


def test_estimates_are_made_of_shaped_rewards_and_overlong_responses_still_vote() -> None:
    grpo = {
        "normalize_rewards": False,
        "use_leave_one_out_baseline": False,
        "reward_scaling": {"enabled": True, "target_min": -1},
        "reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0.0},
        "overlong_filtering": True,
    }
    algorithm = build(grpo)
    batch, metrics = algorithm.shape(reward_batch([1, 1, 0, 0], truncated=[False, True, True, False]))
    assert batch.rewards.tolist() == [1, 0, -1, -1]
    assert batch.sample_weights.tolist() == [1, 0, 0, 1]
    assert metrics == {
        "num_scaled_out_of_range": 0.0,
        "reward_penalties/stop_properly": 2.0,
        "raw_reward": 0.5,
        "num_overlong_filtered": 2.0,
    }
    advantages = by_sequence(algorithm.advantages(batch)["advantages"], batch)
    assert advantages == pytest.approx([1.25, 0.25, -0.75, -0.75])


def test_the_filter_goes_by_the_threshold() -> None:
    batch = reward_batch([1, 0], [1, 1], prev_logprobs=[2, -1])
    assert build({"seq_logprob_error_threshold": 2.0}).filter(batch)[0].sample_weights.tolist() == [0, 1]
    assert build().filter(batch)[0].sample_weights.tolist() == [1, 1]


def test_overrides_come_after_the_estimator_and_the_clip_last() -> None:
    grpo = {"normalize_rewards": False, "invalid_tool_call_advantage": -5.0, "advantage_clip_low": -2.0}
    batch = reward_batch([3, -3], lengths=[1, 1])
    flags = torch.where(batch.loss_mask & (batch.sequence_ids == 0), FLAG_BITS[TurnFlag.INVALID_TOOL_CALL], 0)
    advantages = build(grpo).advantages(batch.with_columns(turn_flags=flags))["advantages"]
    assert by_sequence(advantages, batch) == [-2, -2]
    assert by_sequence(build({"normalize_rewards": False}).advantages(batch)["advantages"], batch) == [6, -6]


def test_think_ids_lead_to_the_override() -> None:
    grpo = GRPOConfig(malformed_thinking_advantage=-2.0)
    penalties = RewardPenaltiesConfig(think_open_id=8, think_close_id=9)
    algorithm = build_algorithm(grpo, LossConfig(), True, penalties)
    batch, _ = algorithm.shape(reward_batch([1, 0], [2, 2], tokens=[1, 8, 1, 2]))
    assert by_sequence(algorithm.advantages(batch)["advantages"], batch)[0] == -2


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "gdpo", "raw_reward"])
def test_the_shuffled_control_permutes_for_every_estimator(name: str) -> None:
    estimator = {"adv_estimator": {"name": name}}
    rewards = [float(index % 7) for index in range(12)]
    components = {"a": rewards, "b": [float(index % 5) for index in range(12)]}
    batch = reward_batch(rewards, components=components, groups=[index // 4 for index in range(12)])
    plain = build(estimator).advantages(batch)["advantages"]
    shuffled = build({**estimator, "shuffle_advantages": True}).advantages(batch)["advantages"]
    assert not torch.equal(plain, shuffled)
    assert sorted(by_sequence(plain, batch)) == sorted(by_sequence(shuffled, batch))


def test_the_shuffled_control_moves_overrides_with_the_rest() -> None:
    batch = reward_batch([float(index) for index in range(8)], lengths=[1] * 8)
    flags = torch.where(batch.loss_mask & (batch.sequence_ids < 2), FLAG_BITS[TurnFlag.INVALID_TOOL_CALL], 0)
    batch = batch.with_columns(turn_flags=flags)
    settings = {"invalid_tool_call_advantage": -5.0}
    plain = by_sequence(build(settings).advantages(batch)["advantages"], batch)
    shuffled = by_sequence(build({**settings, "shuffle_advantages": True}).advantages(batch)["advantages"], batch)
    assert plain[:2] == [-5, -5] != shuffled[:2]
    assert sorted(shuffled) == sorted(plain)


def test_a_real_layout_goes_through_every_stage() -> None:
    algorithm = build()
    batch, _ = algorithm.shape(TrainBatch.from_groups(random_groups(0)))
    batch, _ = algorithm.filter(batch)
    batch = batch.with_columns(**algorithm.advantages(batch))
    assert batch.advantages is not None
    assert bool((batch.advantages != 0).any())
