"""Weights for the generator's distance, and each way to truncate them, equal their hand-computed values."""

import math
from typing import Any

import pytest

from tests.support.losses import Outcome, evaluate, objective
from tests.support.rollouts import loss_batch

LN = math.log


def _case_d(kind: str | None, low: float | None = None, high: float | None = None, **changes: Any) -> Outcome:
    batch = loss_batch([-1 - LN(3), -1.0, -1 - LN(0.1)], advantages=[1.0] * 3, prev_logprobs=[-1.0] * 3)
    settings: dict[str, Any] = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }
    return evaluate(objective(**(settings | changes)), [-1, -1, -1], batch)


@pytest.mark.parametrize(
    ("kind", "low", "high", "weights", "value", "outside"),
    [
        (None, None, None, [3, 1, 0.1], -1.3666667, None),
        ("tis", None, 2, [2, 1, 0.1], -1.0333333, 1 / 3),
        ("tis", 0.5, 2, [2, 1, 0.5], -1.1666667, 2 / 3),
        ("icepop", 0.5, 2, [0, 1, 0], -0.3333333, 2 / 3),
        ("icepop", 1.0, 1.0, [0, 1, 0], -0.3333333, 2 / 3),
        ("seq-mask-tis", 0.5, 2, [3, 1, 0.1], -1.3666667, 0),
        ("seq-mask-tis", 0.999, 1.002, [0, 0, 0], 0, 1),
    ],
)
def test_case_d(
    kind: str | None, low: float | None, high: float | None, weights: list[float], value: float, outside: float | None
) -> None:
    got = _case_d(kind, low, high)
    assert got.value == pytest.approx(value, abs=1e-6)
    assert got.gradient == pytest.approx([-weight for weight in weights], rel=1e-5)
    assert got.metrics["sampling_importance_ratio"] == pytest.approx(sum(weights) / 3, rel=1e-5)
    assert got.metrics.get("is_oob_ratio") == (None if outside is None else pytest.approx(outside))


def test_the_geometric_mean_decides_at_its_own_value() -> None:
    assert _case_d("seq-mask-tis", 0.669, 2).metrics["is_oob_ratio"] == 0.0
    assert _case_d("seq-mask-tis", 0.670, 2).metrics["is_oob_ratio"] == 1.0


def test_without_correction_the_weights_are_a_metric_alone() -> None:
    got = _case_d(None, use_importance_sampling_correction=False)
    assert got.value == pytest.approx(-1.0)
    assert got.metrics["sampling_importance_ratio"] == pytest.approx(4.1 / 3, rel=1e-5)


def test_out_of_bounds_sequences_are_counted_per_sequence() -> None:
    generation = [-1 - LN(3), -1.0, -1.0, -1.0]
    batch = loss_batch(generation, advantages=[1.0] * 4, prev_logprobs=[-1.0] * 4, lengths=[1, 3])
    loss = objective(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=2.0,
        truncated_importance_sampling_ratio_min=0.5,
    )
    got = evaluate(loss, [-1.0] * 4, batch)
    assert got.metrics["is_oob_ratio"] == pytest.approx(0.5)
    # Dropped tokens still count in the mean.
    assert got.value == pytest.approx(-3 / 4)


@pytest.mark.parametrize("generation", [-200.0, math.nan, -math.inf])
def test_a_weight_that_is_no_finite_number_counts_as_zero(generation: float) -> None:
    batch = loss_batch([generation, -1.0], advantages=[1.0, 1.0], prev_logprobs=[-1.0, -1.0])
    got = evaluate(objective(use_importance_sampling_correction=True), [-1.0, -1.0], batch)
    assert (got.value, got.gradient) == (pytest.approx(-0.5), pytest.approx([0.0, -1.0]))
