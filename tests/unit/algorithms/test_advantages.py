"""Group statistics and advantages equal their hand-computed values; failures never vote."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.advantages import broadcast_to_tokens, group_advantages, group_statistics
from rl.core.batch import TrainBatch
from tests.support.rollouts import random_groups

NAN = math.nan


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


@given(
    rewards=st.lists(st.one_of(st.floats(-5, 5, width=32), st.just(NAN)), min_size=1, max_size=8),
    leave_one_out=st.booleans(),
)
def test_advantages_are_finite_sum_to_zero_and_follow_a_permutation(rewards: list[float], leave_one_out: bool) -> None:
    got = _advantages(rewards, leave_one_out=leave_one_out)
    assert all(math.isfinite(value) for value in got)
    assert sum(got) == pytest.approx(0, abs=1e-3)
    assert _advantages(rewards[::-1], leave_one_out=leave_one_out) == pytest.approx(got[::-1], abs=1e-5)


def test_every_token_of_every_turn_carries_its_sequences_advantage() -> None:
    batch = TrainBatch.from_groups(random_groups(0))
    values = torch.arange(batch.num_sequences, dtype=torch.float32)
    assert torch.equal(broadcast_to_tokens(values, batch), batch.sequence_ids.to(torch.float32))
