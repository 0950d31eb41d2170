"""All ends of a refit at once: one call on each, every failure collected, and nobody left waiting for a failed end.

    results = await together("transfer", ends, calls, timeout_s, patience)

consumes: one coroutine per end
produces: their results, or AttemptFailed with what every end had to say
waits for: the ends; each keeps the deadline itself and knows more about it, so the driver's comes a little later
unblocked by: the first failure, which aborts all ends
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl.core.concurrency import uninterrupted
from rl.weights.faults import TransferError
from rl.weights.report import AttemptFailed, EndFailure


@dataclass(frozen=True)
class Patience:
    """How long the driver waits beyond what it asked for, in seconds.

    Attributes:
        late: After the deadline of the ends, for their own word about it.
        abort: For all ends to take an abort.
        end: After the abort, for the calls that were under way.
    """

    late: float
    abort: float
    end: float


PATIENCE = Patience(late=2.0, abort=5.0, end=10.0)


class Abortable(Protocol):
    """An end of a refit."""

    async def abort(self, reason: str) -> None:
        """Give up what is under way."""
        ...


async def together(
    phase: str,
    ends: Mapping[str, Abortable],
    calls: Mapping[str, Coroutine[Any, Any, Any]],
    timeout_s: float,
    patience: Patience,
) -> dict[str, Any]:
    """Run one call per end and return the results by end.

    Args:
        phase: For messages.
        ends: All ends by name; all are aborted at the first failure, also those without a call.
        calls: By end.
        timeout_s: The deadline that the ends were given.
        patience: Beyond it.

    Raises:
        AttemptFailed: an end failed, or none did in time.
    """
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    order: list[str] = []
    for name, task in tasks.items():
        task.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]  # a default as a capture
    try:
        done, _ = await asyncio.wait(
            tasks.values(), timeout=timeout_s + patience.late, return_when=asyncio.FIRST_EXCEPTION
        )
        if len(done) == len(tasks) and not any(_failed(task) for task in tasks.values()):
            return {name: task.result() for name, task in tasks.items()}
        await _give_up(phase, ends, tasks, timeout_s, patience)
    except asyncio.CancelledError:
        await uninterrupted(abort_all(ends, f"{phase} was cancelled", patience.abort))
        raise
    finally:
        for task in tasks.values():
            task.cancel()
        # Whatever a late call still raises is moot; reading it keeps asyncio from reporting it.
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    raise AttemptFailed(phase, _failures(tasks, order, phase, timeout_s))


async def each(
    phase: str,
    ends: Mapping[str, Abortable],
    calls: Mapping[str, Coroutine[Any, Any, Any]],
    timeout_s: float,
    patience: Patience,
) -> None:
    """Run one call per end that has nothing to do with the others: a failure of one hinders none of them.

    An end that is late and does not even take an abort is gone; one that takes it is merely late.

    Raises:
        AttemptFailed: with what failed, after all have ended or the deadline has passed.
    """
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout_s + patience.late)
        text = f"{phase} did not end within {timeout_s:g} s"
        late = {name: ends[name] for name, task in tasks.items() if not task.done()}
        gone = await abort_all(late, text, patience.abort)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    ended = {name: task for name, task in tasks.items() if name not in late}
    failures = [EndFailure(name, None) for name, task in ended.items() if task.cancelled()]
    failures += [
        EndFailure(name, error)
        for name, task in ended.items()
        if not task.cancelled() and isinstance(error := task.exception(), Exception)
    ]
    failures += [EndFailure(name, None if name in gone else TransferError(text, "deadline")) for name in late]
    if failures:
        raise AttemptFailed(phase, failures)


async def abort_all(ends: Mapping[str, Abortable], reason: str, timeout_s: float) -> set[str]:
    """Tell every end to give up; one that does not take it in time is left alone.

    Returns:
        The names of those that did not.
    """
    tasks = {name: asyncio.ensure_future(end.abort(reason)) for name, end in ends.items()}
    if not tasks:
        return set()
    _, late = await asyncio.wait(tasks.values(), timeout=timeout_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {name for name, task in tasks.items() if task in late}


async def _give_up(
    phase: str,
    ends: Mapping[str, Abortable],
    tasks: Mapping[str, asyncio.Task[Any]],
    timeout_s: float,
    patience: Patience,
) -> None:
    """Abort all ends with the first failure as the reason, and let the calls under way end."""
    first = next(((name, task) for name, task in tasks.items() if task.done() and _failed(task)), None)
    if first is None:
        waiting = ", ".join(name for name, task in tasks.items() if not task.done())
        reason = f"{phase} did not end within {timeout_s:g} s; waiting for {waiting}"
    else:
        reason = f"{first[0]} failed at {phase}: {_error_of(first[1])}"
    await abort_all(ends, reason, patience.abort)
    running = [task for task in tasks.values() if not task.done()]
    if running:
        await asyncio.wait(running, timeout=patience.end)


def _failures(
    tasks: Mapping[str, asyncio.Task[Any]], order: Sequence[str], phase: str, timeout_s: float
) -> list[EndFailure]:
    """What each end had to say, in the order in which they ended; those that did not end come last."""
    found = []
    for name in order:
        error = None if tasks[name].cancelled() else tasks[name].exception()
        if isinstance(error, Exception):
            found.append(EndFailure(name, error))
    found += [EndFailure(name, None) for name, task in tasks.items() if task.cancelled()]
    if all(isinstance(one.error, TransferError) and one.error.kind == "aborted" for one in found):
        # All went well until the deadline, and all obeyed when told to stop: it was too much for the time given.
        text = f"{phase} did not end within {timeout_s:g} s"
        return [EndFailure("every end", TransferError(text, "deadline")), *found]
    return found


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def _error_of(task: asyncio.Task[Any]) -> str:
    error = None if task.cancelled() else task.exception()
    return "it was cancelled" if error is None else str(error) or type(error).__name__
