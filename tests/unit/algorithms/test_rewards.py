"""The reward pipeline: each transform's table, their order, and that no penalty is a reward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.config import GRPOConfig, RewardPenaltiesConfig, RewardScalingConfig
from rl.algorithms.rewards import (
    apply_transforms,
    mark_think_tags,
    penalize_tokens,
    penalize_truncated,
    reward_transforms,
    scale_rewards,
)
from rl.core.batch import FLAG_BITS
from rl.core.errors import ConfigError
from rl.core.types import TurnFlag
from tests.support.reward_batches import NAN, reward_batch

OPEN, CLOSE = 8, 9
THINKING = FLAG_BITS[TurnFlag.MALFORMED_THINKING]
SHAPING = {
    "enabled": True,
    "max_response_length": 4,
    "overlong_buffer_length": 2,
    "overlong_buffer_penalty": 1.0,
}


def test_scaling_maps_the_source_range_and_clamps_to_it() -> None:
    components: dict[str, list[float]] = {"a": [0, 1, 2, -3, NAN, NAN], "b": [0.5, 0.5, 0.5, 0.5, 0.5, NAN]}
    batch = reward_batch([0, 0.5, 1, 2, -1, NAN], components=components)
    scaled, metrics = scale_rewards(batch, RewardScalingConfig(enabled=True, target_min=-1))
    assert scaled.rewards.tolist() == pytest.approx([-1, 0, 1, 1, -1, NAN], nan_ok=True)
    assert metrics == {"num_scaled_out_of_range": 2.0}
    assert scaled.reward_components is not None
    assert scaled.reward_components[:, 0].tolist() == pytest.approx([-1, 1, 1, -1, NAN, NAN], nan_ok=True)
    assert scaled.reward_components[:5, 1].tolist() == [0] * 5


def test_a_forked_rollout_is_counted_once() -> None:
    batch = reward_batch([2, 2, 0], rollouts=[0, 0, 1])
    assert scale_rewards(batch, RewardScalingConfig(enabled=True))[1] == {"num_scaled_out_of_range": 1.0}


@pytest.mark.parametrize(
    ("coefficient", "rewards", "expected"),
    [
        (0.0, [1, -1, 0.5], [0, -1, 0.5]),
        (0.5, [1, -1, 0.5], [0.5, -1, 0.5]),
        (1.0, [1, -1, 0.5], [1, -1, 0.5]),
        (0.5, [NAN, 1, 1], [NAN, 0.5, 1]),
    ],
)
def test_a_truncated_response_never_gains(coefficient: float, rewards: list[float], expected: list[float]) -> None:
    batch = reward_batch(rewards, truncated=[True, True, False])
    shaped, metrics = penalize_truncated(batch, coefficient)
    assert shaped.rewards.tolist() == pytest.approx(expected, nan_ok=True)
    assert metrics == {"reward_penalties/stop_properly": float(sum(reward == reward for reward in rewards[:2]))}


def test_unwanted_tokens_count_only_where_the_policy_sampled_them() -> None:
    masks = [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]]
    batch = reward_batch([1, 1, -1, NAN, 1], masks=masks, tokens=[1, 7, 7, 2, 2, 6, 7, 7, 1, 2])
    capped, metrics = penalize_tokens(batch, (6, 7))
    assert capped.rewards.tolist() == pytest.approx([1, 0, -1, NAN, 1], nan_ok=True)
    assert metrics == {"reward_penalties/unwanted_token": 2.0}


@pytest.mark.parametrize(
    ("mask", "tokens", "malformed"),
    [
        ([0, 1, 1], [1, 2, 3], False),
        ([0, 1, 1], [1, 2, CLOSE], True),
        ([0, 1, 1], [1, OPEN, CLOSE], True),
        ([0, 1, 1], [OPEN, 2, CLOSE], False),
        ([0, 1, 1], [OPEN, 2, 3], True),
        ([0, 1, 1], [OPEN, CLOSE, CLOSE], True),
        ([0, 1, 1], [OPEN, OPEN, CLOSE], True),
        ([0, 0, 1, 1], [OPEN, OPEN, CLOSE, CLOSE], True),
        ([0, 0, 1, 1], [OPEN, CLOSE, 2, 3], False),
        ([0, 0, 1, 1], [CLOSE, 2, 2, 3], True),
    ],
)
def test_think_tags_of_a_turn_match_those_before_it(mask: list[int], tokens: list[int], malformed: bool) -> None:
    batch = reward_batch([1, 1], masks=[[1], mask], tokens=[OPEN, *tokens])
    marked, _ = mark_think_tags(batch, OPEN, CLOSE)
    assert marked.turn_flags is not None
    flags = marked.turn_flags[batch.sequence_ids == 1]
    assert flags.tolist() == [0, *[THINKING * sampled * malformed for sampled in mask]]


def test_each_turn_is_judged_by_itself_and_other_flags_are_kept() -> None:
    batch = reward_batch([1], masks=[[0, 1, 1, 0, 1, 1]], tokens=[OPEN, 2, CLOSE, OPEN, 2, 3])
    batch = batch.with_columns(turn_flags=batch.loss_mask * FLAG_BITS[TurnFlag.INVALID_TOOL_CALL])
    marked, metrics = mark_think_tags(batch, OPEN, CLOSE)
    assert marked.turn_flags is not None
    assert marked.turn_flags.tolist() == [0, 0, 1, 1, 0, 3, 3]
    assert metrics == {"num_malformed_thinking": 1.0, "malformed_thinking_rate": 0.5}


def test_transforms_stand_in_their_order_and_the_raw_reward_is_kept() -> None:
    grpo = GRPOConfig.model_validate({"reward_scaling": {"enabled": True, "target_min": -1}, "reward_shaping": SHAPING})
    penalties = RewardPenaltiesConfig(
        malformed_think_tag=True, think_open_id=OPEN, think_close_id=CLOSE, unwanted_token_ids=[7]
    )
    transforms = reward_transforms(grpo, penalties)
    names = [transform.name for transform in transforms]
    assert names == ["think_tags", "malformed_think_tag", "unwanted_token", "scaling", "overlong"]
    # Malformed; unwanted; long; fine; failed.
    tokens = [OPEN, 7, 2, 2, 2, 2, 2]
    batch = reward_batch([1, 1, 1, 1, NAN], [1, 1, 3, 1, 1], tokens=tokens)
    shaped, metrics = apply_transforms(transforms, batch)
    assert shaped.rewards.tolist() == pytest.approx([-1, -1, 0.5, 1, NAN], nan_ok=True)
    assert shaped.raw_rewards is batch.raw_rewards
    assert metrics["raw_reward"] == 1.0
    assert metrics["reward_penalties/malformed_think_tag"] == 1.0
    assert metrics["reward_penalties/unwanted_token"] == 1.0
    assert metrics["reward_penalties/overlong"] == 1.0


def test_flags_of_the_environment_are_penalised_without_token_ids() -> None:
    transforms = reward_transforms(GRPOConfig(), RewardPenaltiesConfig(malformed_think_tag=True))
    batch = reward_batch([1, -2, 3])
    flags = torch.where(batch.loss_mask & (batch.sequence_ids < 2), THINKING, 0)
    shaped, _ = apply_transforms(transforms, batch.with_columns(turn_flags=flags))
    assert shaped.rewards.tolist() == [0, -2, 3]


def test_without_settings_nothing_is_changed_or_told() -> None:
    assert reward_transforms(GRPOConfig(), RewardPenaltiesConfig()) == []
    batch = reward_batch([1, 2])
    assert apply_transforms([], batch) == (batch, {})


def test_shaping_without_its_settings_is_an_error() -> None:
    with pytest.raises(ConfigError, match="overlong_buffer_penalty, got None, None and None"):
        reward_transforms(GRPOConfig.model_validate({"reward_shaping": {"enabled": True}}), RewardPenaltiesConfig())


@settings(max_examples=50, deadline=None)
@given(
    rewards=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6),
    coefficient=st.floats(0, 1),
    truncated=st.booleans(),
)
def test_no_penalty_ever_raises_a_reward(rewards: list[float], coefficient: float, truncated: bool) -> None:
    batch = reward_batch(rewards, truncated=[truncated] * len(rewards))
    shaping = {"enabled": True, "stop_properly_penalty_coef": coefficient}
    for section in (shaping, SHAPING):
        grpo = GRPOConfig.model_validate({"reward_shaping": section})
        transforms = reward_transforms(grpo, RewardPenaltiesConfig(unwanted_token_ids=[0]))
        shaped, _ = apply_transforms(transforms, batch)
        assert bool((shaped.rewards <= batch.rewards).all())
