"""Tests of rl.controller.reward_metrics."""

import math
from dataclasses import replace

import pytest
import torch

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
    assert metrics["advantages/sum"] == 0.0


def test_the_reward_is_the_trained_one_and_difficulty_goes_by_the_raw_one() -> None:
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [1.0, 0.0])]
    batch = TrainBatch.from_groups(groups)
    metrics = reward_metrics(groups, batch.with_columns(rewards=torch.tensor([0.5, 0.25, 0.5, -1.0])))
    assert metrics["reward"] == 0.0625
    assert metrics["filtered_reward"] == -0.25
    assert metrics["mean_total_reward"] == 0.75
    assert metrics["baseline_reward/pct_1"] == metrics["baseline_reward/pct_mixed"] == 0.5


def test_components_are_weighed_by_nobody() -> None:
    parts = [{"format": 1.0, "correct": 0.0}, {"format": 0.5, "correct": 1.0}, {}]
    rewards = [0.7, 0.3, math.nan]
    rollouts = [
        replace(rollout, reward_components=components)
        for rollout, components in zip(make_group(0, rewards).rollouts, parts, strict=True)
    ]
    groups = [RolloutGroup(0, make_prompt(0), tuple(rollouts))]
    metrics = reward_metrics(groups, TrainBatch.from_groups(groups))
    assert metrics["reward"] == pytest.approx(0.5)
    assert (metrics["reward/format"], metrics["reward/correct"]) == (0.75, 0.5)


def test_a_forked_rollout_counts_once_in_rewards_and_rollouts() -> None:
    turns = (Turn((1, 2), make_completion(0)), Turn((1, 9), make_completion(0), forked=True))
    groups = [RolloutGroup(3, make_prompt(0), (Rollout("3/0", turns, 1.0), Rollout("3/1", turns[:1], 0.0)))]
    batch = TrainBatch.from_groups(groups)
    assert reward_metrics(groups, batch)["reward"] == 0.5
    metrics = batch_metrics(batch, version=0)
    assert (metrics["num_rollouts"], metrics["num_sequences"]) == (2.0, 3.0)


def test_advantages_of_sequences_that_only_a_filter_dropped_are_reported() -> None:
    batch = TrainBatch.from_groups([make_group(0, [0.0, 1.0])])
    batch = batch.with_columns(advantages=batch.sequence_ids.float(), sample_weights=torch.zeros(2))
    metrics = batch_metrics(batch, version=0)
    assert metrics["advantages/max"] == 1.0
    assert "staleness_mean" not in metrics
