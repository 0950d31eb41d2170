"""Waiting for several coroutines as one, and for blocking work beside the loop. It knows no deadlines, no retries."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Run coroutines together; results in order.

    Nothing that was started outlives the call: the first failure, and a cancellation from outside, cancel the others
    and wait for their end before they are raised.

    Raises:
        BaseException: what the first failing coroutine raised; of several that fail at once, the first in order.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        ended = [task for task in tasks if task.done()]
        for task in ended:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # Every result is either taken or moot by now; reading the late failures keeps asyncio from reporting them.
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(name: str, function: Callable[[], R]) -> R:
    """Run blocking work in a thread of its own, so that the loop goes on handling signals.

    Other than with `asyncio.to_thread`, neither the loop nor the interpreter waits for the thread at its end: work that
    is abandoned by a cancellation goes on alone, and ends with the process at the latest.

    Raises:
        Exception: what `function` raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def deliver(result: R | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # without an error it is an R
        else:
            future.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        # The loop of abandoned work may have ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


async def uninterrupted(work: Coroutine[Any, Any, R]) -> R:
    """Await `work` to its end, also when cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None or task.cancelled():
        return task.result()
    task.exception()  # seen: the cancellation is what counts
    raise cancelled
