"""Tests of rl.controller.reward_metrics."""

import math

import pytest

from rl.controller.reward_metrics import batch_metrics, reward_metrics
from rl.core.batch import TrainBatch
from rl.core.types import Rollout, RolloutGroup, RolloutStatus, Turn
from tests.support.fakes import make_completion, make_prompt


def make_group(group_id: int, rewards: list[float], version: int = 0, end_version: int | None = None) -> RolloutGroup:
    """NaN makes a failed rollout."""
    rollouts = tuple(
        Rollout(
            f"{group_id}/{index}",
            (Turn((1, 2, 3), make_completion(version, (5, 6, 7, 8), end_version)),),
            reward,
            RolloutStatus.REWARD_ERROR if math.isnan(reward) else RolloutStatus.OK,
            {"exact": 1.0} if reward == 1.0 else {},
        )
        for index, reward in enumerate(rewards)
    )
    return RolloutGroup(group_id, make_prompt(group_id), rollouts)


def test_rewards_are_over_valid_rollouts_and_failures_are_counted_apart() -> None:
    groups = [make_group(0, [0.0, 0.0]), make_group(1, [1.0, 1.0]), make_group(2, [1.0, float("nan"), 0.0])]
    metrics = reward_metrics(groups, TrainBatch.from_groups(groups))
    assert metrics["reward"] == 0.5
    assert metrics["filtered_reward"] == 0.5
    totals = [metrics[f"{name}_total_reward"] for name in ("mean", "max", "min")]
    assert totals == [0.5, 1.0, 0.0]
    assert metrics["num_valid_rollouts"] == 6.0
    assert metrics["num_invalid_rollouts"] == 1.0
    assert metrics["baseline_reward/pct_0"] == metrics["baseline_reward/pct_1"] == pytest.approx(1 / 3)
    assert metrics["baseline_reward/pct_mixed"] == pytest.approx(1 / 3)


def test_a_mean_over_nothing_is_left_out() -> None:
    groups = [make_group(0, [float("nan")])]
    metrics = reward_metrics(groups, TrainBatch.from_groups(groups))
    assert "reward" not in metrics
    assert "baseline_reward/pct_0" not in metrics
    assert metrics["num_invalid_rollouts"] == 1.0


def test_staleness_comes_from_the_spans_of_the_trained_tokens_alone() -> None:
    groups = [make_group(0, [0.0], version=1, end_version=3), make_group(1, [float("nan")], version=0)]
    metrics = batch_metrics(TrainBatch.from_groups(groups), version=3)
    assert metrics["staleness_max"] == 2.0
    assert metrics["staleness_mean"] == 1.0
    assert metrics["total_num_tokens"] == 14.0


def test_advantages_are_reported_over_tokens() -> None:
    batch = TrainBatch.from_groups([make_group(0, [0.0, 1.0])])
    batch = batch.with_columns(advantages=(batch.sequence_ids * 2 - 1).float())
    metrics = batch_metrics(batch, version=0)
    assert (metrics["advantages/mean"], metrics["advantages/max"], metrics["advantages/min"]) == (0.0, 1.0, -1.0)
