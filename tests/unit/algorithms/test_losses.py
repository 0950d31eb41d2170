"""The clipped policy loss and its metrics equal their hand-computed values, in value and in gradient."""

import math
from typing import Any

import pytest
import torch

from rl.algorithms.config import LossConfig
from rl.algorithms.losses import ClippedPolicyLoss
from rl.core.batch import TrainBatch
from rl.core.metrics import Per, finalize_metrics
from tests.support.rollouts import loss_batch, scatter_sampled

LN = math.log


def _config(**changes: Any) -> LossConfig:
    return LossConfig(**({"reference_policy_kl_penalty": 0.0} | changes))


def _run(
    logprobs: list[float], batch: TrainBatch, config: LossConfig, uses_prev: bool = True
) -> tuple[float, list[float], dict[str, float]]:
    """Return the normalised loss, N x its gradient by token (N = the loss's denominator), and the metrics."""
    leaf = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    full = scatter_sampled(batch.loss_mask, leaf)
    sums = ClippedPolicyLoss(config, uses_prev)(full, torch.zeros_like(full), batch)
    num_tokens, num_sequences = batch.token_weights.sum().item(), batch.sample_weights.sum().item()
    sums.loss.backward()
    assert leaf.grad is not None
    count = num_tokens if sums.per is Per.TOKENS else num_sequences
    value = sums.loss.item() / count if count else sums.loss.item()
    return value, leaf.grad.tolist(), finalize_metrics(sums.metrics, num_tokens, num_sequences)


CASE_A = {"prev_logprobs": [-1.2, -0.6, -1.0], "advantages": [1.0, 1.0, -1.0]}


@pytest.mark.parametrize(
    ("changes", "value"),
    [({}, -0.2901066820), ({"ratio_clip_max": 0.28}, -0.2972409347), ({"force_on_policy_ratio": True}, -1 / 3)],
)
def test_case_a_clipping(changes: dict[str, Any], value: float) -> None:
    batch = loss_batch(CASE_A["prev_logprobs"], **CASE_A)
    assert _run([-1, -1, -1], batch, _config(**changes))[0] == pytest.approx(value, abs=1e-6)


def test_case_a_metrics() -> None:
    metrics = _run([-1, -1, -1], loss_batch(CASE_A["prev_logprobs"], **CASE_A), _config())[2]
    expected = {
        "probs_ratio": 0.9639076,
        "probs_ratio_clamped": 1.0,
        "probs_ratio_min": 0.67032,
        "probs_ratio_max": 1.2214028,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        "approx_entropy": 0.9639076,
        "clipfrac_low": 0.0,
        "clipfrac_high": 1 / 3,
        "dual_clipfrac": 0.0,
        "loss": -0.290106682,
        "kl_penalty": 0.0,
        "num_valid_samples": 1.0,
        "sampling_importance_ratio": 1.0,
        "token_mult_prob_error": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert "is_oob_ratio" not in metrics


@pytest.mark.parametrize(
    ("advantage", "ratio", "bound", "value"),
    [(-1, 5, None, 5), (-1, 5, 3, 3), (-1, 0.5, None, 0.8), (-1, 0.5, 3, 0.8), (1, 5, 3, -1.2), (1, 0.5, 3, -0.5)],
)
def test_case_b_dual_clip(advantage: float, ratio: float, bound: float | None, value: float) -> None:
    batch = loss_batch([-2.0], advantages=[advantage], prev_logprobs=[-2.0 - LN(ratio)])
    got, _, metrics = _run([-2.0], batch, _config(ratio_clip_c=bound))
    assert got == pytest.approx(value, rel=1e-5)
    assert metrics["dual_clipfrac"] == float(advantage < 0 and bound is not None and ratio > bound)


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
    assert _run([-2.0], batch, _config(ratio_clip_c=bound))[1] == pytest.approx([coefficient], rel=1e-5, abs=1e-7)


CASE_D = {"advantages": [1.0, 1.0, 1.0], "prev_logprobs": [-1.0, -1.0, -1.0]}
CASE_D_GENERATION = [-1.0 - LN(3), -1.0, -1.0 - LN(0.1)]


@pytest.mark.parametrize(
    ("low", "high", "weights", "value", "outside"),
    [(None, 2, [2, 1, 0.1], -1.0333333, 1 / 3), (0.5, 2, [2, 1, 0.5], -1.1666667, 2 / 3)],
)
def test_case_d_truncated_importance_sampling(
    low: float | None, high: float, weights: list[float], value: float, outside: float
) -> None:
    config = _config(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
    )
    got, gradient, metrics = _run([-1, -1, -1], loss_batch(CASE_D_GENERATION, **CASE_D), config)
    assert got == pytest.approx(value, abs=1e-6)
    assert gradient == pytest.approx([-weight for weight in weights], rel=1e-5)
    assert metrics["is_oob_ratio"] == pytest.approx(outside)
    assert metrics["sampling_importance_ratio"] == pytest.approx(sum(weights) / 3, rel=1e-5)


def test_case_d_plain_correction_and_metric_without_correction() -> None:
    batch = loss_batch(CASE_D_GENERATION, **CASE_D)
    corrected = _run([-1, -1, -1], batch, _config(use_importance_sampling_correction=True))
    assert corrected[0] == pytest.approx(-1.3666667, abs=1e-6)
    plain = _run([-1, -1, -1], batch, _config())
    assert plain[0] == pytest.approx(-1.0)
    assert plain[2]["sampling_importance_ratio"] == pytest.approx(4.1 / 3, rel=1e-5)


def test_a_weight_that_overflows_counts_as_zero() -> None:
    batch = loss_batch([-200.0, -1.0], advantages=[1.0, 1.0], prev_logprobs=[-1.0, -1.0])
    value, gradient, _ = _run([-1.0, -1.0], batch, _config(use_importance_sampling_correction=True))
    assert (value, gradient) == (pytest.approx(-0.5), pytest.approx([0.0, -1.0]))


def test_case_e_kl_in_the_loss_and_its_gradient() -> None:
    batch = loss_batch([-1.0], advantages=[0.0], prev_logprobs=[-1.0], reference_logprobs=[-0.5])
    value, gradient, metrics = _run([-1.0], batch, LossConfig(reference_policy_kl_penalty=0.01))
    assert value == pytest.approx(0.00148721271, abs=1e-8)
    assert metrics["kl_penalty"] == pytest.approx(0.148721271, abs=1e-6)
    assert gradient == pytest.approx([0.01 * -0.5], rel=1e-5)


@pytest.mark.parametrize(("reference", "coefficient"), [(24.0, 0.0), (4.0, 0.0), (-0.9, 0.1 * -0.1)])
def test_an_active_clamp_lets_no_gradient_through(reference: float, coefficient: float) -> None:
    batch = loss_batch([-1.0], advantages=[0.0], prev_logprobs=[-1.0], reference_logprobs=[reference])
    gradient = _run([-1.0], batch, LossConfig(reference_policy_kl_penalty=0.1))[1]
    assert gradient == pytest.approx([coefficient], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.17216, -0.04918, -0.12299]),
        ("k2", [0.17755, -0.07176, -0.10579]),
        ("k3", [0.17216, -0.04918, -0.12299]),
    ],
)
def test_the_expected_kl_gradient_over_all_actions(kind: Any, expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.0, -0.5], requires_grad=True)
    log_p = logits.log_softmax(0)
    probabilities = log_p.detach().exp()
    total = torch.zeros(())
    for action in range(3):
        batch = loss_batch([-1.0], advantages=[0.0], reference_logprobs=[LN(1 / 3)])
        full = torch.cat([torch.zeros(1), log_p[action : action + 1]])
        loss = ClippedPolicyLoss(LossConfig(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind), False)
        total = total + probabilities[action] * loss(full, torch.zeros(2), batch).loss
    total.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-5)


def test_case_f_an_empty_mask_gives_loss_zero_gradient_zero_and_no_nan() -> None:
    batch = loss_batch([-1.0, -2.0], advantages=[1.0, 1.0], prev_logprobs=[-1.0, -2.0], sample_weights=[0.0])
    value, gradient, metrics = _run([-1.0, -2.0], batch, _config())
    assert (value, gradient) == (0.0, [0.0, 0.0])
    assert metrics == {"num_valid_samples": 0.0}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 100.0])
def test_case_g_what_stands_in_masked_positions_reaches_neither_value_nor_gradient(garbage: float) -> None:
    config = LossConfig(reference_policy_kl_penalty=1.0, use_importance_sampling_correction=True)
    clean = {"advantages": [1.0, 1.0], "prev_logprobs": [-1.0, -1.0], "reference_logprobs": [-1.2, -1.2]}
    dirty = {name: [values[0], garbage] for name, values in clean.items()}
    parts = {"lengths": [1, 1], "sample_weights": [1.0, 0.0]}
    expected = _run([-1.0, -1.0], loss_batch([-1.0, -1.0], **clean, **parts), config)
    got = _run([-1.0, garbage], loss_batch([-1.0, garbage], **dirty, **parts), config)
    assert got == expected
    assert got[1][1] == 0.0


def test_masked_kl_with_nan_has_the_right_sum_and_gradient() -> None:
    batch = loss_batch([-1, -1], [0, 0], reference_logprobs=[-1.2, -1.2], lengths=[1, 1], sample_weights=[1, 0])
    value, gradient, _ = _run([-1.0, math.nan], batch, LossConfig(reference_policy_kl_penalty=1.0), uses_prev=False)
    assert value == pytest.approx(0.0187308, abs=1e-6)
    assert gradient == pytest.approx([0.2, 0.0], abs=1e-6)


@pytest.mark.parametrize(("token_level", "value"), [(True, -0.5), (False, 0.0)])
def test_token_and_sequence_reduction_of_unequal_lengths(token_level: bool, value: float) -> None:
    batch = loss_batch([-1] * 4, advantages=[-1, 1, 1, 1], lengths=[1, 3])
    got = _run([-1] * 4, batch, _config(token_level_loss=token_level), uses_prev=False)[0]
    assert got == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(("token_level", "share"), [(True, 1000 / 1010), (False, 0.5)])
def test_the_weight_of_a_long_sequence(token_level: bool, share: float) -> None:
    batch = loss_batch([-1] * 1010, advantages=[0] * 10 + [-1] * 1000, lengths=[10, 1000])
    got = _run([-1] * 1010, batch, _config(token_level_loss=token_level), uses_prev=False)[0]
    assert got == pytest.approx(share, rel=1e-5)


def test_a_fractional_weight_scales_loss_and_counts() -> None:
    batch = loss_batch([-1, -1], advantages=[-2, -6], lengths=[1, 1], sample_weights=[1.0, 0.5])
    got = _run([-1, -1], batch, _config(), uses_prev=False)[0]
    assert got == pytest.approx((2 + 3) / 1.5)


def test_mismatch_metrics() -> None:
    batch = loss_batch([-1.0, -2.0], advantages=[0, 0], prev_logprobs=[-1.5, -2.0])
    metrics = _run([-1.5, -2.0], batch, _config())[2]
    expected = {
        "token_mult_prob_error": 1.3243606,
        "gen_kl_error": 0.0532653,
        "policy_kl_error": 0.0743606,
        "js_divergence_error": 0.0154649,
        "approx_entropy": 1.4548980,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_mismatch_metrics_of_an_outlier() -> None:
    metrics = _run([-15.0], loss_batch([-5.0], advantages=[0], prev_logprobs=[-15.0]), _config())[2]
    assert metrics["gen_kl_error"] == pytest.approx(9.0000454, rel=1e-6)
    assert metrics["policy_kl_error"] == pytest.approx(22015.47, rel=1e-5)
    assert metrics["token_mult_prob_error"] == pytest.approx(22026.47, rel=1e-5)


def test_the_logprob_gap_looks_only_at_tokens_of_the_version_in_training() -> None:
    batch = loss_batch([-1.0, -2.0], advantages=[0, 0], prev_logprobs=[-1.25, -9.0])
    batch = batch.with_columns(token_versions=torch.tensor([-1, 3, 2]))
    assert _run([-1.25, -9.0], batch.at_version(3), _config())[2]["max_logprob_diff"] == pytest.approx(0.25)
    assert "max_logprob_diff" not in _run([-1.25, -9.0], batch.at_version(4), _config())[2]
    assert "max_logprob_diff" not in _run([-1.25, -9.0], batch, _config())[2]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_logprob_gap_that_is_no_number_is_counted_and_does_not_vanish(broken: float) -> None:
    batch = loss_batch([-1.0, -2.0, -3.0], advantages=[0, 0, 0], prev_logprobs=[-1.25, broken, -3.0])
    batch = batch.with_columns(token_versions=torch.tensor([-1, 3, 3, 3])).at_version(3)
    metrics = _run([-1.25, -2.0, -3.0], batch, _config())[2]
    assert metrics["num_nonfinite_logprob_gaps"] == 1.0
    assert metrics["max_logprob_diff"] == pytest.approx(0.25)


def test_a_single_update_gives_what_stored_prev_logprobs_would_give() -> None:
    values = [-1.0, -0.3, -2.0]
    with_prev = loss_batch([-1.1, -0.2, -2.0], advantages=[1, -1, 2], prev_logprobs=values)
    without = loss_batch([-1.1, -0.2, -2.0], advantages=[1, -1, 2])
    config = _config(use_importance_sampling_correction=True)
    assert _run(values, with_prev, config) == _run(values, without, config, uses_prev=False)


@pytest.mark.parametrize(
    ("missing", "config", "uses_prev"),
    [
        ("advantages", _config(), False),
        ("prev_logprobs", _config(), True),
        ("reference_logprobs", LossConfig(reference_policy_kl_penalty=0.1), False),
    ],
)
def test_a_missing_column_is_named(missing: str, config: LossConfig, uses_prev: bool) -> None:
    columns: dict[str, Any] = {"advantages": [1.0], "prev_logprobs": [-1.0], "reference_logprobs": [-1.0]}
    with pytest.raises(ValueError, match=missing):
        _run([-1.0], loss_batch([-1.0], **(columns | {missing: None})), config, uses_prev)


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio_clip_min": 0.05},
        {"ratio_clip_max": 0.05},
        {"ratio_clip_c": 1.5},
        {"force_on_policy_ratio": True},
        {"token_level_loss": False},
        {"reference_policy_kl_penalty": 0.3},
        {"reference_policy_kl_type": "k1"},
        {"reference_policy_kl_type": "k2"},
        {"kl_input_clamp_value": 0.1},
        {"kl_output_clamp_value": 0.001},
        {"use_importance_sampling_correction": False},
        {"truncated_importance_sampling_type": None},
        {"truncated_importance_sampling_ratio": 1.01},
        {"truncated_importance_sampling_ratio_min": 0.99},
    ],
)
def test_every_knob_changes_the_gradient(changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "reference_policy_kl_penalty": 0.1,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.2,
        "truncated_importance_sampling_ratio_min": 0.5,
    }
    prev = [-1.1, -0.9, -1.1, -3.0]
    batch = loss_batch(
        [-1.3, -0.7, -1.2, -2.5],
        advantages=[1.0, -1.0, -0.5, -2.0],
        prev_logprobs=prev,
        reference_logprobs=[-1.3, -1.4, -0.6, -2.0],
        lengths=[1, 3],
    )
    logprobs = [-1.0, -1.0, -1.0, -2.0]
    before, after = _run(logprobs, batch, LossConfig(**base)), _run(logprobs, batch, LossConfig(**(base | changes)))
    assert before[1] != pytest.approx(after[1], rel=1e-4)
