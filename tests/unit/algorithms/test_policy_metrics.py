"""The metrics of the policy-gradient loss equal their hand-computed values."""

import math

import pytest
import torch

from tests.support.losses import evaluate, objective
from tests.support.rollouts import loss_batch

CASE_A = {"prev_logprobs": [-1.2, -0.6, -1.0], "advantages": [1.0, 1.0, -1.0]}


def test_case_a() -> None:
    metrics = evaluate(objective(), [-1, -1, -1], loss_batch(CASE_A["prev_logprobs"], **CASE_A), [1, 2, 6]).metrics
    expected = {
        "probs_ratio": 0.9639076,
        "probs_ratio_clamped": 1.0,
        "probs_ratio_min": 0.67032,
        "probs_ratio_max": 1.2214028,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        "approx_entropy": 0.9639076,
        "entropy": 3.0,
        "clipfrac_low": 0.0,
        "clipfrac_high": 1 / 3,
        "dual_clipfrac": 0.0,
        "loss": -0.290106682,
        "kl_penalty": 0.0,
        "num_valid_samples": 1.0,
        "num_clamped_log_ratios": 0.0,
        "sampling_importance_ratio": 1.0,
        "token_mult_prob_error": 1.0,
        "gen_kl_error": 0.0,
        "policy_kl_error": 0.0,
        "js_divergence_error": 0.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-5)


def test_the_distance_between_generator_and_trainer() -> None:
    batch = loss_batch([-1.0, -2.0], advantages=[0, 0], prev_logprobs=[-1.5, -2.0])
    metrics = evaluate(objective(), [-1.5, -2.0], batch).metrics
    expected = {
        "token_mult_prob_error": 1.3243606,
        "gen_kl_error": 0.0532653,
        "policy_kl_error": 0.0743606,
        "js_divergence_error": 0.0154649,
        "approx_entropy": 1.4548980,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_the_distance_of_an_outlier() -> None:
    metrics = evaluate(objective(), [-15.0], loss_batch([-5.0], advantages=[0], prev_logprobs=[-15.0])).metrics
    assert metrics["gen_kl_error"] == pytest.approx(9.0000454, rel=1e-6)
    assert metrics["policy_kl_error"] == pytest.approx(22015.47, rel=1e-5)
    assert metrics["token_mult_prob_error"] == pytest.approx(22026.47, rel=1e-5)


def test_the_configured_estimator_measures_the_distance_also_without_a_penalty() -> None:
    batch = loss_batch([-1.0], advantages=[0], prev_logprobs=[-1.5])
    metrics = evaluate(objective(reference_policy_kl_type="k1"), [-1.5], batch).metrics
    assert (metrics["gen_kl_error"], metrics["policy_kl_error"]) == (0.5, -0.5)


@pytest.mark.parametrize(("ratio", "low", "high", "dual"), [(0.5, 1, 0, 0), (1.5, 0, 0, 0), (4.0, 0, 0, 1)])
def test_clip_fractions_of_a_bad_token(ratio: float, low: float, high: float, dual: float) -> None:
    batch = loss_batch([-2.0], advantages=[-1.0], prev_logprobs=[-2.0 - math.log(ratio)])
    metrics = evaluate(objective(ratio_clip_c=3.0), [-2.0], batch).metrics
    assert [metrics[name] for name in ("clipfrac_low", "clipfrac_high", "dual_clipfrac")] == [low, high, dual]


def test_the_logprob_gap_looks_only_at_tokens_of_the_version_in_training() -> None:
    batch = loss_batch([-1.0, -2.0], advantages=[0, 0], prev_logprobs=[-1.25, -9.0])
    batch = batch.with_columns(token_versions=torch.tensor([-1, 3, 2]))
    loss = objective()
    assert evaluate(loss, [-1.25, -9.0], batch.at_version(3)).metrics["max_logprob_diff"] == pytest.approx(0.25)
    assert "max_logprob_diff" not in evaluate(loss, [-1.25, -9.0], batch.at_version(4)).metrics
    assert "max_logprob_diff" not in evaluate(loss, [-1.25, -9.0], batch).metrics


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_logprob_gap_that_is_no_number_is_counted_and_does_not_vanish(broken: float) -> None:
    batch = loss_batch([-1.0, -2.0, -3.0], advantages=[0, 0, 0], prev_logprobs=[-1.25, broken, -3.0])
    batch = batch.with_columns(token_versions=torch.tensor([-1, 3, 3, 3])).at_version(3)
    metrics = evaluate(objective(), [-1.25, -2.0, -3.0], batch).metrics
    assert metrics["num_nonfinite_logprob_gaps"] == 1.0
    assert metrics["max_logprob_diff"] == pytest.approx(0.25)
