"""What a refit says when it is over: the report of one that completed, and the error of one that did not.

RefitError: refit of version 4 failed at transfer in attempt 2: replica generation[1] (readers 1-2) is gone: ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rl.core.errors import InfraError, WeightSyncError
from rl.core.types import PolicyVersion
from rl.weights.faults import TransferError

# CLEAN: no weight that generates was touched. DIRTY: replicas may hold parts of two versions.
RefitState = Literal["CLEAN", "DIRTY"]
TRAINER = "the trainer"
_REST = {
    "CLEAN": "No generator's weights were touched",
    "DIRTY": "Generators may hold a mixture of two versions",
}
# Who is to blame is seldom who fails first: a process that dies is noticed later than the silence that it leaves.
_ORDER = ("mismatch", "data loss", "invalid", "device", "unavailable", "silent", "deadline", "peer lost", "aborted")
_GONE = -1


@dataclass(frozen=True)
class SyncReport:
    """One completed refit.

    Attributes:
        version: What every replica holds.
        seconds: From the call to the resumed generator.
        bytes: Of one copy of the model.
        tensors: Of one copy of the model.
        replicas: Replicas and servers that confirmed.
        changed: Tensors whose bytes are others than in the refit before; all of them in the first.
        attempts: 1, and 1 for every failure before.
        parts: Seconds by part. Of the transaction: pause, transfer, commit. Of the slowest end: gather, copy, digest,
            wire, load.
    """

    version: PolicyVersion
    seconds: float
    bytes: int
    tensors: int
    replicas: int
    changed: int
    attempts: int
    parts: Mapping[str, float]


@dataclass(frozen=True)
class EndFailure:
    """How one end failed in an attempt.

    Attributes:
        end: TRAINER or the name of a replica.
        error: What it raised; None where it did not even end after it was told to give up.
    """

    end: str
    error: Exception | None

    @property
    def is_gone(self) -> bool:
        """Whether the process is dead or hangs: another attempt would not reach it either."""
        return self.error is None or (isinstance(self.error, InfraError) and not isinstance(self.error, TransferError))

    @property
    def text(self) -> str:
        """What happened."""
        if self.error is None:
            return "did not answer, nor end when it was told to give up"
        return str(self.error) or type(self.error).__name__


class AttemptFailed(Exception):
    """One attempt did not succeed.

    Attributes:
        phase: What was being done.
        failures: Of all ends, in the order in which they were noticed; at least one.
    """

    def __init__(self, phase: str, failures: Sequence[EndFailure]) -> None:
        super().__init__(phase)
        self.phase = phase
        self.failures = tuple(failures)

    @property
    def culprit(self) -> EndFailure:
        """The end that began it, as far as the errors tell."""
        return min(self.failures, key=_place)

    @property
    def is_late(self) -> bool:
        """Whether it failed for want of time; an end that is merely silent may have been lost long before."""
        kinds = {_kind(one) for one in self.failures}
        return _kind(self.culprit) in ("silent", "deadline") and ("deadline" in kinds or kinds <= {"silent", "aborted"})


class RefitError(WeightSyncError):
    """A refit failed for good; generators stay paused, unless pausing or resuming them is what failed.

    Attributes:
        version: What was to be published.
        phase: What was being done.
        state: CLEAN or DIRTY.
        end: TRAINER, the name of a replica, or of one of its readers.
        attempts: How many were made.
    """

    def __init__(
        self, version: PolicyVersion, phase: str, state: RefitState, end: str, detail: str, attempts: int
    ) -> None:
        again = f" in attempt {attempts}" if attempts > 1 else ""
        now = "they may not all be paused" if phase in ("pause", "resume") else "they stay paused"
        super().__init__(
            f"refit of version {version} failed at {phase}{again}: {end}: {detail}. {_REST[state]} ({state}); {now}"
        )
        self._arguments = (version, phase, state, end, detail, attempts)
        self.version = version
        self.phase = phase
        self.state = state
        self.end = end
        self.attempts = attempts

    def __reduce__(self) -> tuple[type["RefitError"], tuple[PolicyVersion, str, RefitState, str, str, int]]:
        """Survive pickling with all that it knows."""
        return type(self), self._arguments


def describe(failure: AttemptFailed, readers: Sequence[str]) -> tuple[str, str]:
    """Name the first bad end of an attempt, and say what it and the others report.

    Args:
        failure: Of the attempt.
        readers: Names of all readers in rank order.

    Returns:
        The end, and the detail.
    """
    culprit = failure.culprit
    details = [culprit.text]
    error = culprit.error
    if isinstance(error, TransferError) and error.reader is not None and error.reader < len(readers):
        details.append(f"the reader is {readers[error.reader]}")
    # Whoever was merely told to give up has nothing to add.
    details += [f"{other.end} reports: {other.text}" for other in failure.failures if _adds(other, culprit)]
    return culprit.end, "; ".join(details)


def blamed_reader(failure: AttemptFailed) -> int | None:
    """Return the reader that others found silent or lost, where one is named; it may itself report nothing."""
    errors = [one.error for one in failure.failures if isinstance(one.error, TransferError)]
    named = [error.reader for error in errors if error.kind in ("peer lost", "deadline") and error.reader is not None]
    return named[0] if named else None


def _kind(failure: EndFailure) -> str:
    if failure.error is None:
        return "silent"
    return failure.error.kind if isinstance(failure.error, TransferError) else "invalid"


def _place(failure: EndFailure) -> int:
    if failure.error is not None and failure.is_gone:
        return _GONE
    return _ORDER.index(_kind(failure))


def _adds(other: EndFailure, culprit: EndFailure) -> bool:
    return other is not culprit and _kind(other) != "aborted" and other.text != culprit.text
