"""Who is blamed for a failed attempt, and what the error says; the transaction around it is in test_sync."""

import pickle

import pytest

from rl.core.errors import InfraError, WeightSyncError
from rl.weights.faults import FIRST_READER, FaultKind, TransferError
from rl.weights.report import TRAINER, AttemptFailed, EndFailure, RefitError, blamed_reader, describe

READERS = ("generation[0].0", "generation[0].1", "generation[1].0")


def fault(end: str, kind: FaultKind, text: str = "it broke", rank: int = -1) -> EndFailure:
    return EndFailure(end, TransferError(text, kind, rank))


@pytest.mark.parametrize(
    "worse",
    [
        EndFailure("generation[1]", InfraError("its process ended")),
        EndFailure("generation[1]", None),
        fault("generation[1]", "mismatch"),
        fault("generation[1]", "peer lost"),
        EndFailure("generation[1]", WeightSyncError("it cannot take 'v'")),
    ],
)
def test_who_was_told_to_give_up_is_not_to_blame(worse: EndFailure) -> None:
    told = fault(TRAINER, "aborted")
    for failures in ([told, worse], [worse, told]):
        assert AttemptFailed("transfer", failures).culprit is worse


def test_a_dead_process_is_to_blame_before_those_who_miss_it() -> None:
    dead = EndFailure("generation[0]", InfraError("its process ended"))
    failure = AttemptFailed(
        "transfer", [fault(TRAINER, "peer lost", "no word"), fault("generation[1]", "deadline"), dead]
    )
    assert describe(failure, READERS) == (
        "generation[0]",
        "its process ended; the trainer reports: no word; generation[1] reports: it broke",
    )


def test_the_reader_that_an_end_blames_is_named() -> None:
    failure = AttemptFailed("transfer", [fault(TRAINER, "peer lost", "no word", FIRST_READER + 2)])
    assert blamed_reader(failure) == 2
    assert describe(failure, READERS) == (TRAINER, "no word; the reader is generation[1].0")
    beyond = AttemptFailed("transfer", [fault(TRAINER, "peer lost", "no word", FIRST_READER + 3)])
    assert describe(beyond, READERS) == (TRAINER, "no word")


def test_a_root_is_no_reader() -> None:
    assert blamed_reader(AttemptFailed("transfer", [fault("generation[0]", "peer lost", rank=1)])) is None


@pytest.mark.parametrize(
    ("failures", "is_late"),
    [
        ([fault(TRAINER, "deadline")], True),
        ([EndFailure("generation[0]", None), fault(TRAINER, "aborted")], True),
        ([EndFailure("generation[0]", None), fault(TRAINER, "peer lost")], False),
        ([EndFailure("generation[0]", InfraError("dead")), fault(TRAINER, "deadline")], False),
    ],
)
def test_only_want_of_time_is_late(failures: list[EndFailure], is_late: bool) -> None:
    assert AttemptFailed("transfer", failures).is_late is is_late


@pytest.mark.parametrize(
    ("phase", "state", "attempts", "words"),
    [
        (
            "transfer",
            "DIRTY",
            2,
            "failed at transfer in attempt 2: .* mixture of two versions .DIRTY.; they stay paused$",
        ),
        ("start", "CLEAN", 1, "failed at start: .* No generator's weights were touched .CLEAN.; they stay paused$"),
        ("pause", "CLEAN", 1, "failed at pause: .* touched .CLEAN.; they may not all be paused$"),
        ("resume", "DIRTY", 2, "failed at resume in attempt 2: .*; they may not all be paused$"),
    ],
)
def test_the_error_says_how_far_it_came_and_what_generates(phase: str, state: str, attempts: int, words: str) -> None:
    error = RefitError(4, phase, state, "generation[1]", "it broke", attempts)  # type: ignore[arg-type]
    with pytest.raises(RefitError, match=words) as got:
        raise pickle.loads(pickle.dumps(error))
    again = got.value
    assert (again.version, again.phase, again.state, again.end, again.attempts) == (
        4,
        phase,
        state,
        "generation[1]",
        attempts,
    )
