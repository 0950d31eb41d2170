"""The raw reward as advantage, whitened or not."""

import pytest

from rl.algorithms.raw_reward import RawReward
from tests.support.reward_batches import NAN, by_sequence, reward_batch


@pytest.mark.parametrize(
    ("whiten", "rewards", "lengths", "expected"),
    [
        (False, [1, -0.5, NAN], [2, 1, 1], [1, -0.5, 0]),
        (True, [1, 0, 0, 0], [4, 1, 1, 2], [1, -1, -1, -1]),
        (True, [1, 0, NAN], [1, 1, 9], [1, -1, 0]),
        (True, [0.7], [3], [0]),
    ],
)
def test_the_reward_is_the_advantage(
    whiten: bool, rewards: list[float], lengths: list[int], expected: list[float]
) -> None:
    batch = reward_batch(rewards, lengths)
    assert by_sequence(RawReward(whiten)(batch)["advantages"], batch) == pytest.approx(expected, abs=1e-5)
