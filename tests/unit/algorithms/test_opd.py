"""On-policy distillation: the teacher's log-probability over the student's."""

import pytest

from rl.algorithms.algorithm import Need
from rl.algorithms.opd import OnPolicyDistillation
from tests.support.reward_batches import reward_batch


@pytest.mark.parametrize(("student", "expected"), [(-1.0, [1, 1, 1, 0, 0, 0]), (0.0, [0] * 6)])
def test_the_gap_is_the_advantage_of_the_sampled_tokens(student: float, expected: list[float]) -> None:
    masks = [[1, 1, 1, 0, 0, 0]]
    batch = reward_batch([0], masks=masks, teacher_logprobs=[0] * 6, prev_logprobs=[student] * 6)
    estimator = OnPolicyDistillation()
    assert estimator(batch)["advantages"].tolist() == [0, *expected]
    assert estimator.needs == {Need.PREV, Need.TEACHER}


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="teacher_logprobs and prev_logprobs"):
        OnPolicyDistillation()(reward_batch([0]))
