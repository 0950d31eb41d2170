"""A deadline with a name for every wait. Time comes from an injected Clock."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rl.core.clock import Clock
from rl.core.errors import InfraError

R = TypeVar("R")


async def within(clock: Clock, seconds: float, what: str, work: Coroutine[Any, Any, R]) -> R:
    """Await `work`, but no longer than `seconds`; late work is cancelled and not waited for.

    Raises:
        InfraError: the deadline passed; names `what`. An error of `work` itself arrives unchanged.
    """
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise InfraError(f"{what} did not end within {seconds:g} s")
    finally:
        timer.cancel()
        if not task.done():
            task.add_done_callback(_consume)
            task.cancel()


def _consume(task: "asyncio.Future[Any]") -> None:
    """Mark the late outcome as seen; the deadline was the error that counts."""
    if not task.cancelled():
        task.exception()
