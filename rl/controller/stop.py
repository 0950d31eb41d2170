"""A request to stop: long waits are abandoned at once, everything else finishes its phase."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class RunStopped(Exception):
    """A guarded wait was abandoned because the run was asked to stop."""


class StopSignal:
    """Set once, from a signal handler on the loop or from anywhere in it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Whether the run shall stop."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for the stop."""
        self._event.set()

    async def guard(self, work: Coroutine[Any, Any, R]) -> R:
        """Await `work`, which must be safe to cancel.

        Raises:
            RunStopped: the stop was requested before `work` ended.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise RunStopped
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
