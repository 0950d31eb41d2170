"""The losses without a ratio: REINFORCE, and the ratio that is 1 by definition; both report the true ratio."""

from typing import Any

import pytest

from tests.support.losses import evaluate, objective
from tests.support.rollouts import loss_batch

CASE_A = {"prev_logprobs": [-1.2, -0.6, -1.0], "advantages": [1.0, 1.0, -1.0]}


@pytest.mark.parametrize(
    ("changes", "value"), [({"disable_ppo_ratio": True}, 1 / 3), ({"force_on_policy_ratio": True}, -1 / 3)]
)
def test_case_a(changes: dict[str, Any], value: float) -> None:
    batch = loss_batch(CASE_A["prev_logprobs"], **CASE_A)
    got = evaluate(objective(**changes), [-1, -1, -1], batch)
    assert got.value == pytest.approx(value, abs=1e-6)
    assert got.gradient == [-1.0, -1.0, 1.0]
    assert got.metrics["probs_ratio"] == got.metrics["probs_ratio_clamped"] == pytest.approx(0.9639076, abs=1e-6)
    assert [got.metrics[name] for name in ("clipfrac_low", "clipfrac_high", "dual_clipfrac")] == [0.0, 0.0, 0.0]


def test_the_forced_ratio_comes_before_the_missing_one() -> None:
    batch = loss_batch([-1.0], advantages=[2.0])
    assert evaluate(objective(force_on_policy_ratio=True, disable_ppo_ratio=True), [-1.0], batch).value == -2.0


def test_on_policy_distillation_is_reinforce_with_icepop_and_the_teachers_lead_as_advantage() -> None:
    teacher, student = [-0.5, -1.0, -2.0], [-1.0, -1.0, -1.0]
    lead = [t - s for t, s in zip(teacher, student, strict=True)]
    batch = loss_batch([-1.0, -1.0, -9.0], advantages=lead, prev_logprobs=student)
    opd = objective(
        disable_ppo_ratio=True,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=5.0,
        truncated_importance_sampling_ratio_min=0.2,
    )
    got = evaluate(opd, student, batch)
    # The third token's weight exp(8) is out of bounds; it still counts in the mean.
    assert got.value == pytest.approx((0.5 * 1.0 + 0.0) / 3)
    assert got.gradient == pytest.approx([-0.5, 0.0, 0.0])
    assert got.metrics["is_oob_ratio"] == pytest.approx(1 / 3)
