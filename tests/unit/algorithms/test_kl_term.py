"""The KL penalty: its value, its gradient token by token, and its expected gradient over all actions."""

import math
from typing import Any

import pytest
import torch

from rl.ops.kl import kl_estimate
from tests.support.losses import evaluate, gradient_of, objective
from tests.support.rollouts import loss_batch


def test_case_e_value_metric_and_gradient() -> None:
    batch = loss_batch([-1.0], advantages=[0.0], prev_logprobs=[-1.0], reference_logprobs=[-0.5])
    got = evaluate(objective(reference_policy_kl_penalty=0.01), [-1.0], batch)
    assert got.value == pytest.approx(0.00148721271, abs=1e-8)
    assert got.metrics["kl_penalty"] == pytest.approx(0.148721271, abs=1e-6)
    assert got.gradient == pytest.approx([0.01 * -0.5], rel=1e-5)


def test_the_on_policy_approximation_weighs_by_the_generators_probability() -> None:
    batch = loss_batch([-1.2], advantages=[0.0], reference_logprobs=[-0.5])
    loss = objective(True, reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    assert evaluate(loss, [-1.0], batch).value == pytest.approx(0.1816485702, abs=1e-7)


@pytest.mark.parametrize("generation", [-200.0, math.nan, -math.inf])
def test_an_approximation_weight_that_is_no_number_is_zero_with_gradient_zero(generation: float) -> None:
    batch = loss_batch([generation], advantages=[0.0], reference_logprobs=[-0.5])
    loss = objective(True, reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    got = evaluate(loss, [-1.0], batch)
    assert (got.value, got.gradient) == (0.0, [0.0])


@pytest.mark.parametrize(("reference", "coefficient"), [(24.0, 0.0), (4.0, 0.0), (-0.9, 0.1 * -0.1)])
@pytest.mark.parametrize("approximation", [False, True])
def test_an_active_clamp_lets_no_gradient_through(reference: float, coefficient: float, approximation: bool) -> None:
    batch = loss_batch([-1.0], advantages=[0.0], prev_logprobs=[-1.0], reference_logprobs=[reference])
    loss = objective(reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=approximation)
    assert evaluate(loss, [-1.0], batch).gradient == pytest.approx([coefficient], abs=1e-6)


def test_in_the_reward_the_penalty_is_reported_and_left_out_of_the_loss() -> None:
    batch = loss_batch([-1.0], advantages=[0.0], prev_logprobs=[-1.0], reference_logprobs=[-0.5])
    loss = objective(True, reference_policy_kl_penalty=0.01, use_kl_in_reward=True)
    got = evaluate(loss, [-1.0], batch)
    assert (got.value, got.gradient) == (0.0, [0.0])
    assert got.metrics["kl_penalty"] == pytest.approx(0.148721271, abs=1e-6)
    assert (loss.uses_prev, loss.uses_reference) == (True, True)


@pytest.mark.parametrize("token_level", [True, False])
def test_the_penalty_has_the_reduction_of_the_loss(token_level: bool) -> None:
    batch = loss_batch([-1.0] * 4, advantages=[0.0] * 4, reference_logprobs=[-1.5, -1, -1, -1], lengths=[1, 3])
    loss = objective(True, reference_policy_kl_penalty=1.0, reference_policy_kl_type="k1", token_level_loss=token_level)
    assert evaluate(loss, [-1.0] * 4, batch).value == pytest.approx(0.5 / (4 if token_level else 2))


EXACT = [0.17216, -0.04918, -0.12299]


@pytest.mark.parametrize(
    ("kind", "weighted", "expected"),
    [
        ("k1", True, EXACT),
        ("k2", True, [0.17755, -0.07176, -0.10579]),
        ("k3", True, EXACT),
        ("k1", False, [0.0, 0.0, 0.0]),
        ("k2", False, EXACT),
        ("k3", False, [0.17315, -0.02614, -0.14701]),
    ],
)
def test_the_expected_gradient_over_all_actions(kind: Any, weighted: bool, expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.0, -0.5], requires_grad=True, dtype=torch.float64)
    log_p = logits.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for action in range(3):
        if weighted:
            batch = loss_batch([-1.0], advantages=[0.0], reference_logprobs=[-math.log(3)])
            loss = objective(True, reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
            full = torch.cat([torch.zeros(1, dtype=torch.float64), log_p[action : action + 1]])
            estimate = loss(full, torch.zeros(2), batch).loss
        else:
            reference = torch.full((), -math.log(3), dtype=torch.float64)
            estimate = kl_estimate(log_p[action], reference, kind, weight=None, input_clamp=None, output_clamp=None)
        total = total + log_p[action].detach().exp() * estimate
    assert gradient_of(total, logits).tolist() == pytest.approx(expected, abs=1e-5)
    if expected == EXACT:
        log_p = logits.log_softmax(0)
        exact = gradient_of((log_p.exp() * (log_p + math.log(3))).sum(), logits)
        assert exact.tolist() == pytest.approx(EXACT, abs=1e-5)
