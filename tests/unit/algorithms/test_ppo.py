"""The clipped surrogate and dual clip equal their hand-computed values, in value and in gradient."""

import math
from typing import Any

import pytest
import torch

from rl.ops.logprobs import token_logprobs
from tests.support.losses import evaluate, objective
from tests.support.rollouts import loss_batch

LN = math.log
CASE_A = {"prev_logprobs": [-1.2, -0.6, -1.0], "advantages": [1.0, 1.0, -1.0]}


@pytest.mark.parametrize(("changes", "value"), [({}, -0.2901066820), ({"ratio_clip_max": 0.28}, -0.2972409347)])
def test_case_a_clipping(changes: dict[str, Any], value: float) -> None:
    batch = loss_batch(CASE_A["prev_logprobs"], **CASE_A)
    assert evaluate(objective(**changes), [-1, -1, -1], batch).value == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "ratio", "bound", "value"),
    [(-1, 5, None, 5), (-1, 5, 3, 3), (-1, 0.5, None, 0.8), (-1, 0.5, 3, 0.8), (1, 5, 3, -1.2), (1, 0.5, 3, -0.5)],
)
def test_case_b_dual_clip(advantage: float, ratio: float, bound: float | None, value: float) -> None:
    batch = loss_batch([-2.0], advantages=[advantage], prev_logprobs=[-2.0 - LN(ratio)])
    got = evaluate(objective(ratio_clip_c=bound), [-2.0], batch)
    assert got.value == pytest.approx(value, rel=1e-5)
    assert got.metrics["dual_clipfrac"] == float(advantage < 0 and bound is not None and ratio > bound)


@pytest.mark.parametrize(
    ("advantage", "ratio", "bound", "coefficient"),
    [
        (1, 1.1, None, -1.1),
        (1, 1.3, None, 0),
        (-1, 0.7, None, 0),
        (-1, 1.3, None, 1.3),
        (-1, 5, 3, 0),
        (-1, 5, None, 5),
    ],
)
def test_gradient_coefficients(advantage: float, ratio: float, bound: float | None, coefficient: float) -> None:
    batch = loss_batch([-2.0], advantages=[advantage], prev_logprobs=[-2.0 - LN(ratio)])
    got = evaluate(objective(ratio_clip_c=bound), [-2.0], batch)
    assert got.gradient == pytest.approx([coefficient], rel=1e-5, abs=1e-7)


def test_at_the_start_of_a_step_the_ratio_is_exactly_one_and_both_branches_pull_alike() -> None:
    batch = loss_batch([-0.3, -2.0], advantages=[1.5, -0.5])
    got = evaluate(objective(single_update=True), [-0.3, -2.0], batch)
    assert got.gradient == [-1.5, 0.5]
    assert {got.metrics[name] for name in ("probs_ratio", "probs_ratio_min", "probs_ratio_max")} == {1.0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_where_nothing_moved_the_ratio_is_exactly_one_at_every_temperature(temperature: float) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 3, 6, 2, 2])
    first, second = (token_logprobs(logits, targets, temperature, impl="torch")[0] for _ in range(2))
    batch = loss_batch(first.tolist(), advantages=[1.0] * 5, prev_logprobs=first.tolist())
    got = evaluate(objective(), second.tolist(), batch)
    assert {got.metrics[name] for name in ("probs_ratio_min", "probs_ratio_max")} == {1.0}
    assert got.metrics["token_mult_prob_error"] == 1.0
