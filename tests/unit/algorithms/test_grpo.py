"""GRPO asks for the columns that it needs, and its shuffled control only permutes."""

import pickle

import pytest
import torch

from rl.algorithms.algorithm import Need
from rl.algorithms.config import GRPOConfig, LossConfig
from rl.algorithms.grpo import build_grpo
from rl.core.batch import TrainBatch
from rl.core.errors import ConfigError
from tests.support.rollouts import random_groups


@pytest.mark.parametrize(
    ("beta", "single_update", "needs"),
    [
        (0.0, True, set()),
        (0.0, False, {Need.PREV}),
        (0.1, True, {Need.REFERENCE}),
        (0.1, False, {Need.PREV, Need.REFERENCE}),
    ],
)
def test_needs_follow_the_configuration(beta: float, single_update: bool, needs: set[Need]) -> None:
    algorithm = build_grpo(GRPOConfig(), LossConfig(reference_policy_kl_penalty=beta), single_update)
    assert algorithm.needs == needs
    assert list(algorithm.losses) == ["policy"]


def test_the_loss_can_travel_to_a_worker() -> None:
    loss = build_grpo(GRPOConfig(), LossConfig(), True).losses["policy"]
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_an_on_policy_ratio_with_several_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_global_batch_size"):
        build_grpo(GRPOConfig(), LossConfig(force_on_policy_ratio=True), single_update=False)


def test_advantages_follow_both_switches() -> None:
    batch = TrainBatch.from_groups(random_groups(0))
    columns = [
        build_grpo(GRPOConfig(normalize_rewards=n, use_leave_one_out_baseline=b), LossConfig(), True).advantages(batch)
        for n in (True, False)
        for b in (True, False)
    ]
    values = [column["advantages"] for column in columns]
    assert all(not torch.equal(values[i], values[j]) for i in range(4) for j in range(i))


def test_shuffling_permutes_within_the_step_is_reproducible_and_differs_between_steps() -> None:
    batch = TrainBatch.from_groups(random_groups(0, num_groups=8))
    plain = build_grpo(GRPOConfig(), LossConfig(), True).advantages(batch)["advantages"]
    control = build_grpo(GRPOConfig(shuffle_advantages=True, seed=3), LossConfig(), True)
    shuffled = control.advantages(batch)["advantages"]
    starts = batch.offsets[:-1]
    assert not torch.equal(plain, shuffled)
    assert torch.equal(plain[starts].sort().values, shuffled[starts].sort().values)
    assert torch.equal(control.advantages(batch)["advantages"], shuffled)
    later = batch.with_columns(group_ids=batch.group_ids + 8)
    assert not torch.equal(control.advantages(later)["advantages"], shuffled)


def test_shuffling_leaves_failed_rollouts_at_zero() -> None:
    batch = TrainBatch.from_groups(random_groups(0, num_groups=8))
    valid = torch.arange(batch.num_sequences) % 5 != 0
    batch = batch.with_columns(valid=valid, sample_weights=valid.float())
    shuffled = build_grpo(GRPOConfig(shuffle_advantages=True), LossConfig(), True).advantages(batch)["advantages"]
    assert torch.all(shuffled[batch.offsets[:-1]][~valid] == 0)
