"""All ends at once: every failure is heard, all are told to give up, and nobody is waited for longer than allowed."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from rl.core.errors import InfraError, WeightSyncError
from rl.weights.attempt import PATIENCE, each, together
from rl.weights.faults import TransferError
from rl.weights.report import AttemptFailed, EndFailure, describe
from tests.support.virtual_loop import virtually

READERS = ("generation[0].0", "generation[1].0")


class End:
    """Waits until it is told to give up, or fails at once."""

    def __init__(self, failure: Exception | None = None, abort_failure: Exception | None = None) -> None:
        self.failure = failure
        self.abort_failure = abort_failure
        self.hangs_in_abort = False
        self.reasons: list[str] = []
        self.told = asyncio.Event()

    async def call(self) -> str:
        if self.failure is not None:
            raise self.failure
        await self.told.wait()
        raise TransferError(self.reasons[0])

    async def abort(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.hangs_in_abort:
            await asyncio.Event().wait()
        if self.abort_failure is not None:
            raise self.abort_failure
        self.told.set()


async def failure_of(
    ends: Mapping[str, End], timeout_s: float = 5.0, **others: Coroutine[Any, Any, Any]
) -> AttemptFailed:
    calls = {name: end.call() for name, end in ends.items()} | others
    with pytest.raises(AttemptFailed) as caught:
        await together("transfer", ends, calls, timeout_s, PATIENCE)
    return caught.value


async def test_two_failures_at_once_are_both_told_and_the_third_end_ends_by_the_abort() -> None:
    ends = {
        "generation[0]": End(RuntimeError("no memory")),
        "the trainer": End(InfraError("the worker has died")),
        "generation[1]": End(),
    }
    failure = await failure_of(ends)
    assert {one.end for one in failure.failures} == set(ends)
    end, detail = describe(failure, READERS)
    assert end == "the trainer", "the process that died is the cause"
    assert detail == "the worker has died; generation[0] reports: no memory"
    assert ends["generation[1]"].reasons == ["generation[0] failed at transfer: no memory"]


async def test_an_end_that_fails_in_abort_does_not_keep_the_others_from_hearing_it() -> None:
    broken = End(RuntimeError("no memory"), abort_failure=RuntimeError("this end is gone"))
    waiting = End()
    failure = await failure_of({"generation[0]": broken, "generation[1]": waiting})
    assert waiting.told.is_set()
    assert describe(failure, READERS) == ("generation[0]", "no memory")


@virtually
async def test_an_end_that_hangs_in_abort_and_in_its_call_is_named_and_costs_the_patience_alone() -> None:
    deaf = End()
    deaf.hangs_in_abort = True
    loop = asyncio.get_running_loop()
    begin = loop.time()
    failure = await failure_of({"generation[0]": End(), "generation[1]": deaf}, timeout_s=0.1)
    assert loop.time() - begin == pytest.approx(0.1 + PATIENCE.late + PATIENCE.abort + PATIENCE.end)
    end, detail = describe(failure, READERS)
    assert (end, detail) == ("generation[1]", "did not answer, nor end when it was told to give up")
    assert next(one for one in failure.failures if one.end == "generation[1]").is_gone


@virtually
async def test_ends_that_all_obey_at_the_deadline_had_too_little_time() -> None:
    failure = await failure_of({"generation[0]": End(), "generation[1]": End()}, timeout_s=0.1)
    end, detail = describe(failure, READERS)
    assert (end, detail) == ("every end", "transfer did not end within 0.1 s")
    assert failure.is_late


@pytest.mark.parametrize(
    ("kinds", "is_late"),
    [
        (["deadline", "aborted"], True),
        (["silent", "deadline", "peer lost"], True),
        (["silent", "aborted"], True),
        (["silent", "peer lost", "aborted"], False),  # lost by silence, long before any deadline
        (["peer lost", "deadline"], True),
        (["mismatch", "deadline"], False),
        (["peer lost"], False),
    ],
)
def test_a_failure_is_late_where_no_other_cause_is_known(kinds: list[Any], is_late: bool) -> None:
    errors = [None if kind == "silent" else TransferError("x", kind) for kind in kinds]
    assert AttemptFailed("transfer", [EndFailure("e", error) for error in errors]).is_late == is_late


@virtually
async def test_an_answer_that_comes_after_the_attempt_is_nobodys() -> None:
    answered = asyncio.Event()

    async def late() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            answered.set()
            return "version 3 is loaded"
        return ""

    failure = await failure_of({"generation[0]": End(RuntimeError("no memory"))}, **{"generation[1]": late()})
    assert answered.is_set()
    assert [one.end for one in failure.failures] == ["generation[0]"]


async def test_a_cancelled_attempt_tells_all_ends_before_it_ends() -> None:
    ends = {"generation[0]": End(), "generation[1]": End(abort_failure=WeightSyncError("it has left"))}
    calls = {name: end.call() for name, end in ends.items()}
    task = asyncio.ensure_future(together("transfer", ends, calls, 5.0, PATIENCE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [end.reasons for end in ends.values()] == [["transfer was cancelled"]] * 2


async def test_a_call_that_somebody_else_cancels_is_a_failure_of_its_end_and_no_cancelled_refit() -> None:
    ends = {"generation[0]": End(), "generation[1]": End()}

    async def done() -> None:
        """Paused."""

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(AttemptFailed) as caught:
        await each("pause", ends, {"generation[0]": cancelled(), "generation[1]": done()}, 5.0, PATIENCE)
    assert list(caught.value.failures) == [EndFailure("generation[0]", None)]
