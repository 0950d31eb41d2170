"""Group statistics and advantages equal their hand-computed values; failures never vote."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.advantages import by_rollout, group_advantages, group_statistics, shuffle, spread
from tests.support.reward_batches import NAN, by_sequence, reward_batch


def _advantages(rewards: list[float], *, leave_one_out: bool, normalize: bool = True) -> list[float]:
    values = torch.tensor(rewards)
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    valid = values.isfinite()
    return group_advantages(values, valid, ids, leave_one_out=leave_one_out, normalize=normalize).tolist()


@pytest.mark.parametrize(
    ("rewards", "mean", "std"),
    [
        ([1, 0, 0, 0], 0.25, 0.5),
        ([1, 1, 0, 0], 0.5, 0.5773503),
        ([3, 1, 2], 2.0, 1.0),
        ([2, 2, 2], 2.0, 0.0),
        ([0.1, 0.1, 0.1], 0.1, 0.0),
        ([1], 1.0, 0.0),
        ([1, NAN, 0, 0], 1 / 3, 0.5773503),
    ],
)
def test_group_statistics_are_over_the_valid_rows_with_unbiased_std(
    rewards: list[float], mean: float, std: float
) -> None:
    values = torch.tensor(rewards, dtype=torch.float32)
    statistics = group_statistics(values, values.isfinite(), torch.zeros(len(rewards), dtype=torch.int64))
    assert statistics.mean.tolist() == pytest.approx([mean] * len(rewards), abs=1e-6)
    assert statistics.std.tolist() == pytest.approx([std] * len(rewards), abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ([1, 1, 0, 0], [0.8660254, 0.8660254, -0.8660254, -0.8660254]),
        ([1, NAN, 0, 0], [1.1547005, 0, -0.5773503, -0.5773503]),
        ([1, 0, NAN], [0.7071068, -0.7071068, 0]),
        ([2], [0]),
        ([1, NAN, NAN], [0, 0, 0]),
        ([NAN, NAN], [0, 0]),
        ([5, 5, 5], [0, 0, 0]),
    ],
)
def test_mean_baseline(rewards: list[float], expected: list[float]) -> None:
    assert _advantages(rewards, leave_one_out=False) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [2, -2 / 3, -2 / 3, -2 / 3]),
        ([1, 1, 0, 0], [1.1547005, 1.1547005, -1.1547005, -1.1547005]),
        ([1, 0], [1.4142136, -1.4142136]),
        ([3, 1, 2], [1.5, -1.5, 0]),
        ([1, NAN, 0, 0], [1.7320508, 0, -0.8660254, -0.8660254]),
        ([1, 0, NAN], [1.4142136, -1.4142136, 0]),
        ([1, NAN], [0, 0]),
        ([4, 4], [0, 0]),
    ],
)
def test_leave_one_out_baseline_with_the_groups_one_std(rewards: list[float], expected: list[float]) -> None:
    assert _advantages(rewards, leave_one_out=True) == pytest.approx(expected, abs=1e-5)


def test_without_normalisation_leave_one_out_is_rloo_and_sums_to_zero() -> None:
    assert _advantages([1, 0, 0, 0], leave_one_out=True, normalize=False) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert _advantages([1, 0, NAN], leave_one_out=True, normalize=False) == pytest.approx([1, -1, 0])
    assert _advantages([1, 0, NAN], leave_one_out=False, normalize=False) == pytest.approx([0.5, -0.5, 0])


@pytest.mark.parametrize(
    ("leave_one_out", "high", "low"), [(False, 2.5617377, -0.3659625), (True, 2.7325202, -0.39036)]
)
def test_closed_form_for_two_of_sixteen(leave_one_out: bool, high: float, low: float) -> None:
    advantages = _advantages([1, 1] + [0] * 14, leave_one_out=leave_one_out)
    assert advantages == pytest.approx([high] * 2 + [low] * 14, abs=1e-5)


def test_groups_go_by_id_whatever_their_size_and_place() -> None:
    ids = torch.tensor([9, 4, 9, 4, 4, 7, 9])
    rewards = torch.tensor([1.0, 1, 0, 0, 0, 1, 0])
    got = group_advantages(rewards, torch.ones(7, dtype=torch.bool), ids, leave_one_out=False, normalize=False)
    assert got.tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, 0, -1 / 3])


@settings(deadline=None)
@given(
    rewards=st.lists(st.one_of(st.floats(-5, 5, width=32), st.just(NAN)), min_size=1, max_size=8),
    leave_one_out=st.booleans(),
)
def test_advantages_are_finite_sum_to_zero_and_follow_a_permutation(rewards: list[float], leave_one_out: bool) -> None:
    got = _advantages(rewards, leave_one_out=leave_one_out)
    assert all(math.isfinite(value) for value in got)
    assert sum(got) == pytest.approx(0, abs=1e-3)
    assert _advantages(rewards[::-1], leave_one_out=leave_one_out) == pytest.approx(got[::-1], abs=1e-5)


def test_every_sampled_token_of_every_turn_carries_its_rollouts_value_and_no_other_does() -> None:
    batch = reward_batch([1, 0, NAN], masks=[[1, 1, 0, 0, 1], [1], [1, 0, 1]])
    advantages = spread(torch.tensor([1.0, 2.0, 3.0]), by_rollout(batch), batch)
    assert advantages.tolist() == [0, 1, 1, 0, 0, 1, 0, 2, 0, 3, 0, 3]


def test_a_rollout_of_several_sequences_votes_once_and_all_its_sequences_share_the_advantage() -> None:
    whole = reward_batch([1, 0, 0], rollouts=[0, 1, 2])
    forked = reward_batch([1, 1, 1, 0, 0], rollouts=[0, 0, 0, 1, 2])
    values = []
    for batch in (whole, forked):
        rows = by_rollout(batch)
        mine = group_advantages(rows.rewards, rows.valid, rows.group_ids, leave_one_out=False, normalize=True)
        values.append(by_sequence(spread(mine, rows, batch), batch))
    assert values[1] == [values[0][0]] * 3 + values[0][1:]


def test_rollouts_keep_their_order_when_the_batch_was_reordered() -> None:
    batch = reward_batch([1, 0, 5], rollouts=[0, 1, 2]).select([2, 0, 1])
    rows = by_rollout(batch)
    assert rows.rewards.tolist() == [1, 0, 5]
    assert rows.rewards[rows.of_sequence].tolist() == batch.rewards.tolist()


def test_shuffling_permutes_within_the_step_is_reproducible_and_differs_between_steps() -> None:
    batch = reward_batch([float(i) for i in range(16)], lengths=[1 + i % 5 for i in range(16)])
    rows = by_rollout(batch)
    plain = spread(torch.arange(16) - 7.5, rows, batch)
    shuffled = shuffle(plain, batch, seed=3)
    assert not torch.equal(plain, shuffled)
    assert sorted(by_sequence(shuffled, batch)) == sorted(by_sequence(plain, batch))
    assert torch.equal(shuffle(plain, batch, seed=3), shuffled)
    assert not torch.equal(shuffle(plain, batch.with_columns(group_ids=batch.group_ids + 8), seed=3), shuffled)


def test_shuffling_leaves_failed_rollouts_at_zero_and_hands_out_means_of_uneven_advantages() -> None:
    batch = reward_batch([1, NAN, 0, NAN])
    uneven = torch.where(batch.loss_mask, torch.arange(batch.num_tokens, dtype=torch.float32), 0.0)
    shuffled = by_sequence(shuffle(uneven, batch, seed=0), batch)
    assert shuffled[1] == shuffled[3] == 0
    assert sorted([shuffled[0], shuffled[2]]) == [1.5, 7.5]
