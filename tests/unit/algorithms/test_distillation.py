"""Top-K distillation equals its hand-computed values, and sees the student's mass outside the K tokens."""

import math
from typing import Any

import pytest
import torch

from rl.algorithms.distillation import TopKDistillation
from tests.support.losses import divided, gradient_of
from tests.support.rollouts import loss_batch


def _value(loss: TopKDistillation, student: list[float], teacher: list[float], indices: list[int]) -> float:
    batch = loss_batch([0.0])
    rows = [torch.tensor([[0.0] * len(each), each]) for each in (student, teacher)]
    return divided(loss(rows[0], rows[1], torch.tensor([[0] * len(indices), indices]), batch), batch.count())


@pytest.mark.parametrize(("kind", "value"), [("forward", 0.0671308), ("reverse", 0.0826077), ("mixed", 0.0748692)])
def test_both_normalised_over_the_top_k(kind: Any, value: float) -> None:
    loss = TopKDistillation(kind, zero_outside_topk=False)
    assert _value(loss, [1.0, 0.0, 5.0], [2.0, 0.0], [0, 1]) == pytest.approx(value, abs=1e-6)
    assert _value(loss, [1.0, 0.0], [1.0, 0.0], [0, 1]) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(("kind", "value"), [("forward", 0.1614750), ("reverse", 8.7756193), ("mixed", 4.4685472)])
def test_the_students_true_probabilities_are_the_default(kind: Any, value: float) -> None:
    assert _value(TopKDistillation(kind), [1.0, 0.0, -1.0], [2.0, 0.0], [0, 1]) == pytest.approx(value, abs=1e-5)


def test_the_reverse_divergence_adds_entropy_and_penalty_of_the_rest() -> None:
    inside = _value(TopKDistillation("reverse"), [1.0, 0.0, -1.0], [2.0, 0.0], [0, 1])
    p = torch.tensor([1.0, 0.0, -1.0]).log_softmax(0)
    log_q = torch.tensor([2.0, 0.0]).log_softmax(0)
    rest = p[2].exp() * p[2] + 100 * p[2].exp()
    assert p[2].exp().item() == pytest.approx(0.0900306, abs=1e-6)
    assert rest.item() == pytest.approx(8.7862992, abs=1e-5)
    assert inside == pytest.approx(((p[:2].exp() * (p[:2] - log_q)).sum() + rest).item(), abs=1e-5)


def test_mixed_weighs_the_forward_one() -> None:
    student, teacher = [1.0, 0.0, -1.0], [2.0, 0.0]
    values = [
        _value(TopKDistillation(kind, 0.25), student, teacher, [0, 1]) for kind in ("forward", "reverse", "mixed")
    ]
    assert values[2] == pytest.approx(0.25 * values[0] + 0.75 * values[1], rel=1e-6)


def test_only_the_true_probabilities_see_mass_that_leaves_the_top_k() -> None:
    student, teacher = [1.0, 0.0, 9.0], [1.0, 0.0]
    assert _value(TopKDistillation("forward", zero_outside_topk=False), student, teacher, [0, 1]) < 1e-6
    assert _value(TopKDistillation("forward"), student, teacher, [0, 1]) > 5


def test_masked_places_reach_neither_value_nor_gradient() -> None:
    batch = loss_batch([0.0] * 2, lengths=[1, 1], sample_weights=[1, 0])
    leaf = torch.tensor([[math.nan] * 2, [1.0, 0.0], [math.inf] * 2, [math.nan] * 2], requires_grad=True)
    teacher = torch.tensor([[math.nan] * 2, [2.0, 0.0], [0.0, 0.0], [math.nan] * 2])
    sums = TopKDistillation("forward")(leaf, teacher, torch.tensor([[0, 1]] * 4), batch)
    assert divided(sums, batch.count()) == pytest.approx(0.0671308, abs=1e-6)
    assert gradient_of(sums.loss, leaf)[[0, 2, 3]].tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("width", [0, 3])
def test_a_teacher_without_columns_that_match_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="K >= 1"):
        TopKDistillation()(
            torch.zeros(2, 4), torch.zeros(2, width), torch.zeros(2, 0, dtype=torch.int64), loss_batch([0.0])
        )
