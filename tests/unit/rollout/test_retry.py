"""Tests of rl.rollout.retry."""

import pytest

from rl.core.errors import ConfigError, DataError, InfraError
from rl.rollout.config import RolloutFailureConfig
from rl.rollout.retry import Fail, Failures, GiveUp, Retry, decide, is_infra

BUDGETS = RolloutFailureConfig(
    max_infra_attempts_per_prompt=6, max_data_attempts_per_prompt=2, backoff_base_s=1.0, max_backoff_s=4.0
)


@pytest.mark.parametrize("error", [InfraError("x"), TimeoutError("x"), ConnectionResetError("x")])
def test_infrastructure_errors_are_recognised_by_kind(error: Exception) -> None:
    assert is_infra(error)


@pytest.mark.parametrize("error", [DataError("x"), ValueError("x"), KeyError("x")])
def test_unknown_errors_count_as_data_errors(error: Exception) -> None:
    assert not is_infra(error)


def test_infrastructure_pauses_double_up_to_a_bound_and_then_the_group_is_dropped() -> None:
    failures, pauses = Failures(), []
    error = InfraError("engine died")
    for _ in range(6):
        failures = failures.plus(error)
        decision = decide(error, failures, BUDGETS)
        pauses.append(decision.delay_s if isinstance(decision, Retry) else decision)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0, GiveUp("infra_error")]


def test_data_errors_are_retried_at_once_and_rarely() -> None:
    error = DataError("bad row")
    assert decide(error, Failures(data=1), BUDGETS) == Retry(0.0)
    assert decide(error, Failures(data=2), BUDGETS) == GiveUp("data_error")


def test_the_two_budgets_are_apart() -> None:
    assert decide(DataError("x"), Failures(infra=5, data=1), BUDGETS) == Retry(0.0)


def test_a_fatal_error_is_never_retried() -> None:
    assert decide(ConfigError("x"), Failures(data=1), BUDGETS) == Fail()
