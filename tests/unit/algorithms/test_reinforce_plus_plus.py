"""Reinforce++ whitens over tokens, with the KL in the reward where that is asked for."""

import math

import pytest

from rl.algorithms.algorithm import Need
from rl.algorithms.kl_in_reward import RewardKl
from rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from tests.support.reward_batches import NAN, by_sequence, reward_batch


@pytest.mark.parametrize(
    ("minus_baseline", "rewards", "lengths", "expected"),
    [
        (True, [1, 0, 0, 0], [2, 2, 2, 2], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        (False, [1, 0, 0, 0], [2, 2, 2, 2], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        (True, [1, 0, 0, 0], [4, 1, 1, 2], [1, -1, -1, -1]),
        (True, [1, 0, NAN], [1, 1, 5], [1, -1, 0]),
        (True, [0.3, 0.3, 0.3], [1, 2, 3], [0, 0, 0]),
        (False, [0.3, 0.3, 0.3], [1, 2, 3], [0, 0, 0]),
        (True, [NAN, NAN], [1, 1], [0, 0]),
    ],
)
def test_tokens_are_whitened_over_the_step(
    minus_baseline: bool, rewards: list[float], lengths: list[int], expected: list[float]
) -> None:
    batch = reward_batch(rewards, lengths)
    advantages = ReinforcePlusPlus(minus_baseline)(batch)["advantages"]
    assert by_sequence(advantages, batch) == pytest.approx(expected, abs=1e-5)


def test_only_the_baseline_sees_groups() -> None:
    batch = reward_batch([1, 0, 11, 10], lengths=[1] * 4, groups=[0, 0, 1, 1])
    with_baseline = by_sequence(ReinforcePlusPlus(True)(batch)["advantages"], batch)
    without = by_sequence(ReinforcePlusPlus(False)(batch)["advantages"], batch)
    assert with_baseline == pytest.approx([1, -1, 1, -1])
    assert without[0] < 0 < without[3]


def test_the_kl_of_each_token_is_charged_before_whitening() -> None:
    # k2 estimates .5 and 0: a = [.5 - .05, -.5].
    batch = reward_batch([1, 0], [1, 1], prev_logprobs=[-1, -1], reference_logprobs=[-2, -1])
    estimator = ReinforcePlusPlus(True, RewardKl(0.1, "k2", 20.0, 10.0))
    assert estimator.needs == {Need.PREV, Need.REFERENCE}
    assert by_sequence(estimator(batch)["advantages"], batch) == pytest.approx([1, -1], abs=1e-5)


def test_tokens_of_one_response_differ_by_their_kl() -> None:
    batch = reward_batch([1, 0], [2, 2], prev_logprobs=[-1, -1, -1, -1], reference_logprobs=[-1, -2, -1, -1])
    advantages = ReinforcePlusPlus(True, RewardKl(0.2, "k2", 20.0, 10.0))(batch)["advantages"][batch.loss_mask]
    raw = [0.5, 0.4, -0.5, -0.5]
    mean = sum(raw) / 4
    std = math.sqrt(sum((value - mean) ** 2 for value in raw) / 4)
    assert advantages.tolist() == pytest.approx([(value - mean) / std for value in raw], abs=1e-5)


def test_without_kl_nothing_is_needed() -> None:
    assert ReinforcePlusPlus(minus_baseline=True).needs == frozenset()
