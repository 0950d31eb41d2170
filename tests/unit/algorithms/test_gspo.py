"""GSPO's ratio of a whole sequence equals its hand-computed values, in value and in gradient."""

import math
from typing import Any

import pytest

from tests.support.losses import evaluate, objective
from tests.support.rollouts import loss_batch

GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
# One row whose log-ratios are .3, -.1, .1; trainer minus generator is .1, .1, -.05.
LOGPROBS = [-0.7, -1.1, -0.9]
PREV = [-1.0, -1.0, -1.0]
GENERATION = [-1.1, -1.1, -0.95]


def _evaluate(**changes: Any) -> Any:
    batch = loss_batch(GENERATION, advantages=[1.0] * 3, prev_logprobs=PREV)
    return evaluate(objective(**(GSPO | changes)), LOGPROBS, batch)


def test_case_c_within_the_bounds_every_token_has_the_same_share_of_the_gradient() -> None:
    got = _evaluate()
    assert got.value == pytest.approx(-1.1051709, abs=1e-6)
    assert got.gradient == pytest.approx([-1.1051709 / 3] * 3, rel=1e-6)
    assert got.metrics["probs_ratio"] == pytest.approx(1.1051709, abs=1e-6)
    assert got.metrics["clipfrac_high"] == 0.0


def test_case_c_a_clipped_sequence_has_no_gradient() -> None:
    got = _evaluate(ratio_clip_max=0.05)
    assert (got.value, got.gradient) == (pytest.approx(-1.05), [0.0, 0.0, 0.0])
    assert got.metrics["clipfrac_high"] == 1.0
    assert got.metrics["probs_ratio_clamped"] == pytest.approx(1.05)


def test_case_c_the_correction_is_the_product_over_the_sequence_and_is_reported_per_sequence() -> None:
    got = _evaluate(use_importance_sampling_correction=True)
    assert got.value == pytest.approx(-1.2840254, abs=1e-6)
    assert got.gradient == pytest.approx([-math.exp(0.25) / 3] * 3, rel=1e-5)
    assert got.metrics["sampling_importance_ratio"] == pytest.approx(1.1618342, abs=1e-6)
    assert _evaluate().metrics["sampling_importance_ratio"] == pytest.approx(1.1618342, abs=1e-6)


@pytest.mark.parametrize(("low", "kept"), [(0.5, 1.0), (1.2, 0.0)])
def test_icepop_drops_whole_sequences(low: float, kept: float) -> None:
    got = _evaluate(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=2.0,
        truncated_importance_sampling_ratio_min=low,
    )
    assert got.value == pytest.approx(-1.2840254 * kept, abs=1e-6)
    assert got.metrics["is_oob_ratio"] == 1 - kept


def test_sequences_do_not_mix_and_the_mean_runs_over_them() -> None:
    batch = loss_batch([-1.0] * 4, advantages=[1, 2, 2, 2], prev_logprobs=[-1.0] * 4, lengths=[1, 3])
    got = evaluate(objective(**GSPO), [-0.9, -1.3, -0.9, -1.0], batch)
    first, second = math.exp(0.1), math.exp(-0.2 / 3)
    assert got.value == pytest.approx(-(first + 2 * second) / 2, rel=1e-6)
    assert got.gradient == pytest.approx([-first, *[-2 * second / 3] * 3], rel=1e-6)
