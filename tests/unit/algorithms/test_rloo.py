"""RLOO: reward minus the mean of the others, undivided."""

import pytest

from rl.algorithms.rloo import RLOO
from tests.support.reward_batches import NAN, by_sequence, reward_batch


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 1, 0, 0], [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ([3, 1, 2], [1.5, -1.5, 0]),
        ([1, 0, NAN], [1, -1, 0]),
        ([5], [0]),
        ([2, 2], [0, 0]),
    ],
)
def test_the_baseline_is_the_mean_of_the_others(rewards: list[float], expected: list[float]) -> None:
    batch = reward_batch(rewards)
    assert by_sequence(RLOO()(batch)["advantages"], batch) == pytest.approx(expected)
