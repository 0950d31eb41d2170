"""Threads that do not keep the process alive: for work that may hang for good, such as a worker's call or Ray's start.

It restarts and ends no thread: a hanging call keeps its thread until the process ends.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class DaemonPool:
    """A thread pool whose threads do not keep the process alive when a call in them hangs."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._threads: list[threading.Thread] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` on a thread of the pool."""
        future: Future[T] = Future()
        if len(self._threads) < self._size:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()
        self._work.put(lambda: run_into(future, function))
        return future

    def close(self) -> None:
        """Let each thread end after its present call."""
        for _ in self._threads:
            self._work.put(None)

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:
            job()


def run_into(future: "Future[T]", function: Callable[[], T]) -> None:
    """Run a function and give its result or error to a future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # SystemExit of a worker must not end its thread silently.
        future.set_exception(error)
    else:
        future.set_result(result)


async def run_or_undo(pool: DaemonPool, work: Callable[[], T], undo: Callable[[], object], timeout_s: float) -> T:
    """Run `work` on the pool's one thread.

    When it fails, or nobody waits for it any longer (deadline, cancellation), `undo` follows it on the same thread,
    whenever that is, and the pool closes.

    Raises:
        TimeoutError: it did not end in time.
    """
    running = pool.submit(work)
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)
    except BaseException:
        pool.submit(undo)
        pool.close()
        raise
