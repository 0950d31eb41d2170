"""A virtual clock: time moves only when nothing else can run."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


class Deadlock(AssertionError):
    """Every task waits, and no timer is pending."""


class _AtOnce(ThreadPoolExecutor):
    """Runs what is handed to a thread at once, so that virtual time does not run away from real work."""

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        future: Future[R] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FakeClock:
    """A Clock whose seconds pass in no time.

    `run(work)` drives the loop: while some task can run it runs; when all wait, the earliest sleeper wakes; when nobody
    sleeps either, the system has deadlocked.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), future))
        await future

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Await `work` while driving time.

        Raises:
            Deadlock: `work` cannot go on.
        """
        asyncio.get_running_loop().set_default_executor(_AtOnce())
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await _until_idle()
                if not task.done() and not self._wake_next():
                    raise Deadlock("every task waits and nothing is scheduled")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle(self) -> None:
        """Let every task run until all wait; time stands still."""
        await _until_idle()

    def advance(self, seconds: float) -> None:
        """Move time and wake who is due; follow with `settle`."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    def _wake_next(self) -> bool:
        while self._sleepers:
            due, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                self._now = max(self._now, due)
                future.set_result(None)
                return True
        return False


async def _until_idle() -> None:
    """Yield until the loop has nothing else that is ready to run."""
    ready: Any = vars(asyncio.get_running_loop())["_ready"]
    await asyncio.sleep(0)
    while ready:
        await asyncio.sleep(0)
