"""Tests of rl.controller.step_metrics."""

import math

import torch

from rl.controller.step_metrics import (
    environment_metrics,
    prefixed,
    rates,
    trained_by_rollout,
)
from rl.core.batch import TrainBatch
from rl.core.types import Rollout, RolloutGroup, RolloutStatus, TrainedSequence, Turn
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


def test_numbers_of_the_environment_are_means_over_the_rollouts_that_have_them() -> None:
    assert environment_metrics(make_group(0, [1.0, 0.0]).rollouts) == {"env/exact": 1.0}


def test_what_a_step_made_of_rollouts_stands_by_their_ids() -> None:
    groups = [make_group(0, [0.0, 1.0])]
    batch = TrainBatch.from_groups(groups)
    batch = batch.with_columns(advantages=(batch.sequence_ids * 2 - 1).float())
    assert trained_by_rollout(groups, batch) == {
        "0/0": (TrainedSequence(0.0, 1.0, -1.0),),
        "0/1": (TrainedSequence(1.0, 1.0, 1.0),),
    }


def test_what_a_step_made_of_a_forked_rollout_has_an_entry_per_sequence() -> None:
    turns = (Turn((1, 2), make_completion(0)), Turn((1, 9), make_completion(0), forked=True))
    group = RolloutGroup(3, make_prompt(0), (Rollout("3/0", turns, 1.0), Rollout("3/1", turns[:1], 0.0)))
    batch = TrainBatch.from_groups([group])
    values = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 4.0, 4.0])
    batch = batch.with_columns(advantages=values, rewards=torch.tensor([0.5, 0.5, 0.25]))
    assert trained_by_rollout([group], batch) == {
        "3/0": (TrainedSequence(0.5, 1.0, 1.0), TrainedSequence(0.5, 1.0, (2.0, 3.0))),
        "3/1": (TrainedSequence(0.25, 1.0, 4.0),),
    }


def test_rates_and_prefixes() -> None:
    metrics = rates(100.0, 10.0, {"total": 4.0, "train": 2.0}, "total", "train")
    assert prefixed("performance", metrics) == {
        "performance/tokens_per_sec": 25.0,
        "performance/samples_per_sec": 2.5,
        "performance/policy_training_tokens_per_sec": 50.0,
    }
