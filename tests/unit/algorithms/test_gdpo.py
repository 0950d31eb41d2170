"""GDPO normalises each component by itself, weighs them by name and whitens over valid rollouts."""

import pytest

from rl.algorithms.gdpo import GDPO
from rl.core.errors import ConfigError
from tests.support.reward_batches import NAN, by_sequence, reward_batch

A, B = [1, 0, 1, 0], [1, 1, 0, 0]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, [1.2247449, 0, 0, -1.2247449]),
        ({"a": 2}, [1.1618950, -0.3872983, 0.3872983, -1.1618950]),
        ({"a": 2, "b": 1}, [1.1618950, -0.3872983, 0.3872983, -1.1618950]),
    ],
)
def test_components_are_weighed_by_name(leave_one_out: bool, weights: dict[str, float], expected: list[float]) -> None:
    batch = reward_batch([2, 1, 1, 0], components={"a": A, "b": B})
    advantages = GDPO(weights, leave_one_out)(batch)["advantages"]
    assert by_sequence(advantages, batch) == pytest.approx(expected, abs=1e-5)


def test_failed_rollouts_are_left_out_of_the_whitening() -> None:
    plain = reward_batch([2, 1, 1, 0], components={"a": A, "b": B})
    failed = reward_batch([2, 1, 1, 0, NAN], components={"a": [*A, NAN], "b": [*B, NAN]})
    expected = by_sequence(GDPO({})(plain)["advantages"], plain)
    assert by_sequence(GDPO({})(failed)["advantages"], failed) == pytest.approx([*expected, 0], abs=1e-6)


def test_equal_sums_of_unlike_components_are_kept_apart() -> None:
    batch = reward_batch([1, 1, 1, 0], components={"a": [1, 0, 0, 0], "b": [0, 1, 1, 0]})
    advantages = by_sequence(GDPO({})(batch)["advantages"], batch)
    assert advantages[0] > advantages[1] == advantages[2]


def test_without_division_components_keep_their_size() -> None:
    batch = reward_batch([0, 0, 0, 0], components={"a": [0, 10, 0, 10], "b": B})
    advantages = by_sequence(GDPO({}, normalize=False)(batch)["advantages"], batch)
    assert advantages == pytest.approx([-0.7755547, 0.9479002, -0.9479002, 0.7755547])


def test_one_rollout_and_equal_rewards_are_centred() -> None:
    one = reward_batch([1], components={"a": [1], "b": [0]})
    equal = reward_batch([1, 1], components={"a": [1, 1], "b": [0, 0]})
    assert by_sequence(GDPO({})(one)["advantages"], one) == [0]
    assert by_sequence(GDPO({})(equal)["advantages"], equal) == [0, 0]


def test_components_that_cancel_leave_nothing_to_whiten() -> None:
    batch = reward_batch([0, 0], components={"a": [1, 0], "b": [1, 0], "c": [0, 1]})
    advantages = GDPO({"a": 0.1, "b": 0.2, "c": 0.3})(batch)["advantages"]
    assert by_sequence(advantages, batch) == [0, 0]


def test_fewer_than_two_components_are_an_error_that_names_them() -> None:
    with pytest.raises(ConfigError, match="at least 2 reward components, but the rewards of this step have a; let"):
        GDPO({})(reward_batch([1, 0], components={"a": [1, 0]}))


def test_an_unknown_weight_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"names \['c'\], but the environment reports \['a', 'b'\]"):
        GDPO({"c": 1})(reward_batch([1, 0], components={"a": [1, 0], "b": [1, 0]}))


def test_a_step_in_which_every_reward_failed_is_no_error() -> None:
    batch = reward_batch([NAN, NAN])
    assert by_sequence(GDPO({"c": 1})(batch)["advantages"], batch) == [0, 0]
