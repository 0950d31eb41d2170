"""Dr. GRPO: reward minus the group's mean, undivided."""

import pytest

from rl.algorithms.dr_grpo import DrGRPO
from tests.support.reward_batches import NAN, by_sequence, reward_batch


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ([10, 0], [5, -5]),
        ([1, 0, NAN], [0.5, -0.5, 0]),
        ([2, 2], [0, 0]),
    ],
)
def test_the_baseline_is_the_mean_of_all(rewards: list[float], expected: list[float]) -> None:
    batch = reward_batch(rewards)
    assert by_sequence(DrGRPO()(batch)["advantages"], batch) == pytest.approx(expected)
