"""Results of samples that could not be scored: counted apart from zeros, without a vote in the baseline."""

import math

from rl.core.types import RolloutStatus
from rl.environments.base import StepResult
from rl.environments.pool import Outcome, OutcomeKind


def failed(status: RolloutStatus, detail: str) -> StepResult:
    """Return the result of a sample without a reward."""
    return StepResult(messages=(), reward=math.nan, done=True, status=status, detail=detail)


def failed_task(outcome: Outcome, subject: str) -> StepResult:
    """Return the result of a sample whose scoring task raised, died or was late."""
    late = outcome.kind is OutcomeKind.TIMEOUT
    return failed(RolloutStatus.REWARD_TIMEOUT if late else RolloutStatus.REWARD_ERROR, f"{subject}: {outcome.detail}")
