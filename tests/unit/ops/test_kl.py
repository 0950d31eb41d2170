"""KL estimators: the numbers of the conventions, the clamps, and the gradient identities."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.core.errors import ConfigError
from rl.ops.kl import importance_weight, kl_estimate, score_function_weight


def estimate(d: float, kind: Any, input_clamp: float | None = 20.0, output_clamp: float | None = 10.0) -> float:
    logprobs = torch.zeros(1, dtype=torch.float64)
    kl = kl_estimate(logprobs, logprobs + d, kind, weight=None, input_clamp=input_clamp, output_clamp=output_clamp)
    return kl.item()


def weighted_gradient(logprob: float, reference: float, kind: Any, **clamps: float | None) -> tuple[float, float]:
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(
        logprobs,
        torch.tensor([reference], dtype=torch.float64),
        kind,
        weight=score_function_weight(logprobs),
        input_clamp=clamps.get("input_clamp"),
        output_clamp=clamps.get("output_clamp"),
    )
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    return kl.item(), gradient.item()


@pytest.mark.parametrize(
    ("d", "kind", "want"),
    [
        (0.5, "k1", -0.5),
        (0.5, "k2", 0.125),
        (0.5, "k3", 0.1487212707),
        (-0.5, "k3", 0.1065306597),
        (math.log(2), "k3", 0.3068528194),
        (25.0, "k3", 10.0),
        (25.0, "k1", -10.0),
        (-10.0, "k3", 9.0000453999),
    ],
)
def test_the_estimators_give_the_published_numbers(d: float, kind: str, want: float) -> None:
    assert estimate(d, kind) == pytest.approx(want, abs=1e-9)


def test_none_disables_a_clamp() -> None:
    assert estimate(25.0, "k1", output_clamp=None) == -20.0
    assert estimate(25.0, "k1", input_clamp=None, output_clamp=None) == -25.0


@pytest.mark.parametrize("d", [-1.5, -0.5, 0.0, 0.7])
def test_gradients_with_the_score_function_weight_have_their_closed_forms(d: float) -> None:
    assert weighted_gradient(-1.0, -1.0 + d, "k1")[1] == pytest.approx(-d + 1, abs=1e-12)
    assert weighted_gradient(-1.0, -1.0 + d, "k2")[1] == pytest.approx(d**2 / 2 - d, abs=1e-12)
    assert weighted_gradient(-1.0, -1.0 + d, "k3")[1] == pytest.approx(-d, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_no_gradient_flows_from_a_token_whose_ratio_was_clamped(kind: str) -> None:
    for output_clamp in (10.0, None):
        assert weighted_gradient(-30.0, -5.0, kind, input_clamp=20.0, output_clamp=output_clamp)[1] == 0.0


def test_an_unknown_estimator_is_refused_by_name() -> None:
    unknown: Any = "k4"
    with pytest.raises(ConfigError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), unknown, weight=None, input_clamp=None, output_clamp=None)


def test_expected_weighted_gradients_of_k1_and_k3_are_the_gradient_of_the_divergence() -> None:
    theta = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.4], dtype=torch.float64), dim=0)

    def gradient(value: Tensor) -> Tensor:
        (result,) = torch.autograd.grad(value, theta)
        return result

    log_p = torch.log_softmax(theta, dim=0)
    exact = gradient((log_p.exp() * (log_p - reference)).sum())
    for kind in ("k1", "k3"):
        log_p = torch.log_softmax(theta, dim=0)
        kl = kl_estimate(
            log_p, reference, kind, weight=score_function_weight(log_p), input_clamp=None, output_clamp=None
        )
        torch.testing.assert_close(gradient((log_p.detach().exp() * kl).sum()), exact)


def test_the_importance_weight_has_a_gradient_where_it_is_finite_and_is_zero_elsewhere() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0, math.nan, -1.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-1.2, -2000.0, math.nan, -1.0, -math.inf], dtype=torch.float64)
    weights = importance_weight(logprobs, sampler)
    (gradient,) = torch.autograd.grad(weights.sum(), logprobs)
    expected = [math.exp(0.2), 0.0, 0.0, 0.0, 0.0]
    assert weights.tolist() == pytest.approx(expected)
    assert gradient.tolist() == pytest.approx(expected)
