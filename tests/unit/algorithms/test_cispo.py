"""CISPO weights every token by its clipped ratio, and leaves none out."""

import math

import pytest

from tests.support.losses import evaluate, objective
from tests.support.rollouts import loss_batch

CASE_A = {"prev_logprobs": [-1.2, -0.6, -1.0], "advantages": [1.0, 1.0, -1.0]}


@pytest.mark.parametrize(
    ("low", "high", "value", "gradient"),
    [
        (0.2, 0.2, 0.3333333, [-1.2, -0.8, 1.0]),
        (1.0, 5.0, 0.2972409347, [-1.2214028, -0.6703200, 1.0]),
    ],
)
def test_case_a(low: float, high: float, value: float, gradient: list[float]) -> None:
    batch = loss_batch(CASE_A["prev_logprobs"], **CASE_A)
    got = evaluate(objective(use_cispo=True, ratio_clip_min=low, ratio_clip_max=high), [-1, -1, -1], batch)
    assert got.value == pytest.approx(value, abs=1e-6)
    assert got.gradient == pytest.approx(gradient, abs=1e-6)


def test_a_token_beyond_the_bound_still_learns() -> None:
    batch = loss_batch([-2.0], advantages=[1.0], prev_logprobs=[-2.0 - math.log(1.3)])
    assert evaluate(objective(use_cispo=True), [-2.0], batch).gradient == pytest.approx([-1.2])


def test_clip_fractions_do_not_look_at_the_advantage() -> None:
    batch = loss_batch(CASE_A["prev_logprobs"], **CASE_A)
    metrics = evaluate(objective(use_cispo=True), [-1, -1, -1], batch).metrics
    assert (metrics["clipfrac_low"], metrics["clipfrac_high"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert metrics["dual_clipfrac"] == 0.0
