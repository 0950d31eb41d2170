"""GRPO's estimator gives the vectors of its formula, through a batch."""

import pytest

from rl.algorithms.grpo import GRPO
from tests.support.reward_batches import NAN, by_sequence, reward_batch


@pytest.mark.parametrize(
    ("leave_one_out", "normalize", "expected"),
    [
        (False, True, [1.5, -0.5, -0.5, -0.5]),
        (True, True, [2, -2 / 3, -2 / 3, -2 / 3]),
        (False, False, [0.75, -0.25, -0.25, -0.25]),
        (True, False, [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_both_switches_act(leave_one_out: bool, normalize: bool, expected: list[float]) -> None:
    batch = reward_batch([1, 0, 0, 0], lengths=[1, 2, 3, 4])
    advantages = GRPO(leave_one_out, normalize)(batch)["advantages"]
    assert by_sequence(advantages, batch) == pytest.approx(expected, abs=1e-5)


def test_groups_go_by_id_and_failed_rollouts_get_nothing() -> None:
    batch = reward_batch([1, 0, 0, NAN, 1], groups=[7, 3, 7, 3, 3])
    advantages = by_sequence(GRPO(leave_one_out=False)(batch)["advantages"], batch)
    assert advantages == pytest.approx([0.7071068, -0.7071068, -0.7071068, 0, 0.7071068], abs=1e-5)
