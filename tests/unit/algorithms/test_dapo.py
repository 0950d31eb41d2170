"""DAPO's soft overlong punishment, with the paper's lower bound, over the response's own tokens."""

import pytest
import torch

from rl.algorithms.dapo import OverlongPunishment
from tests.support.reward_batches import NAN, reward_batch


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0), (100, 0), (120, 0), (140, -0.25), (160, -0.5), (200, -1), (201, -1), (300, -1)],
)
def test_the_penalty_grows_over_the_buffer_and_stays_at_its_largest(length: int, expected: float) -> None:
    assert OverlongPunishment(200, 80, 1.0).of_lengths(torch.tensor([length])).tolist() == [expected]


def test_its_size_scales() -> None:
    assert OverlongPunishment(10, 10, 0.5).of_lengths(torch.tensor([0, 5, 10])).tolist() == [0, -0.25, -0.5]


def test_the_length_is_what_the_policy_sampled_over_all_turns() -> None:
    # 4 sampled tokens in two turns beside 6 of the environment; a failed one; a fork of 3 + 2; 2 alone.
    masks = [[0, 0, 1, 1, 0, 0, 0, 0, 1, 1], [1] * 9, [1, 1, 1], [1, 1], [1, 1]]
    batch = reward_batch([1, NAN, -1, -1, 1], masks=masks, rollouts=[0, 1, 2, 2, 3])
    shaped, metrics = OverlongPunishment(6, 4, 1.0)(batch)
    assert shaped.rewards.tolist() == pytest.approx([0.5, NAN, -1.75, -1.75, 1], nan_ok=True)
    assert metrics == {"reward_penalties/overlong": 2.0}
    assert shaped.raw_rewards is batch.raw_rewards
