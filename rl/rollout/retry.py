"""What to do after a failed attempt. Pure: no clock, no I/O.

decision = decide(error, Failures(infra=1, data=0), config)     # Retry(delay_s=1.0)
"""

from dataclasses import dataclass

from rl.core.errors import FatalError, InfraError
from rl.rollout.config import RolloutFailureConfig


@dataclass(frozen=True)
class Failures:
    """Failed attempts of one group so far, the present one included."""

    infra: int = 0
    data: int = 0

    def plus(self, error: Exception) -> "Failures":
        """Count `error` in its class."""
        if is_infra(error):
            return Failures(self.infra + 1, self.data)
        return Failures(self.infra, self.data + 1)


@dataclass(frozen=True)
class Retry:
    """Try again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Drop the group, for `reason`."""

    reason: str


@dataclass(frozen=True)
class Fail:
    """End the run."""


def is_infra(error: Exception) -> bool:
    """Whether the same work may succeed elsewhere. An unknown error counts as a data error: it must be loud soon."""
    return isinstance(error, InfraError | TimeoutError | ConnectionError)


def decide(error: Exception, failures: Failures, budgets: RolloutFailureConfig) -> Retry | GiveUp | Fail:
    """Decide by the error's kind and the attempts made.

    Infrastructure: pauses of backoff_base_s * 2^(k-1), at most max_backoff_s. Data: at once, few times. Fatal: never.
    """
    if isinstance(error, FatalError):
        return Fail()
    if is_infra(error):
        if failures.infra >= budgets.max_infra_attempts_per_prompt:
            return GiveUp("infra_error")
        doubled = budgets.backoff_base_s * 2.0 ** min(failures.infra - 1, 60)
        return Retry(min(doubled, budgets.max_backoff_s))
    if failures.data >= budgets.max_data_attempts_per_prompt:
        return GiveUp("data_error")
    return Retry(0.0)
