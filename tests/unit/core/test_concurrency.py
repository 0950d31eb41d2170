"""Tests for rl.core.concurrency."""

import asyncio
import threading

import pytest

from rl.core.concurrency import gather_or_cancel, in_thread, uninterrupted


async def _value(value: int) -> int:
    return value


async def _fail(error: Exception) -> int:
    raise error


class _Sleeper:
    """Waits for ever, and takes a turn of the loop to end when it is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = False

    async def run(self) -> int:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended = True
        return 0


def test_results_come_in_the_order_of_the_work() -> None:
    assert asyncio.run(gather_or_cancel([_value(1), _value(2), _value(3)])) == [1, 2, 3]
    assert asyncio.run(gather_or_cancel([])) == []


def test_the_first_failure_ends_the_others_before_it_is_raised() -> None:
    async def scenario() -> bool:
        sleeper = _Sleeper()
        with pytest.raises(ValueError, match="broken"):
            await gather_or_cancel([sleeper.run(), _fail(ValueError("broken"))])
        return sleeper.ended

    assert asyncio.run(scenario())


def test_of_two_failures_the_first_in_order_is_raised() -> None:
    with pytest.raises(ValueError, match="left"):
        asyncio.run(gather_or_cancel([_fail(ValueError("left")), _fail(ValueError("right"))]))


def test_a_cancellation_from_outside_ends_all_of_them_first() -> None:
    async def scenario() -> bool:
        sleeper = _Sleeper()
        task = asyncio.ensure_future(gather_or_cancel([sleeper.run()]))
        await sleeper.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sleeper.ended

    assert asyncio.run(scenario())


def test_blocking_work_leaves_the_loop_free_and_hands_over_its_outcome() -> None:
    async def scenario() -> tuple[str, str]:
        free = threading.Event()

        def work() -> str:
            assert free.wait(60)
            return threading.current_thread().name

        task = asyncio.ensure_future(in_thread("worker", work))
        await asyncio.sleep(0)
        free.set()
        with pytest.raises(ZeroDivisionError):
            await in_thread("broken", lambda: 1 // 0)
        return await task, threading.current_thread().name

    name, own = asyncio.run(scenario())
    assert name == "worker" != own


def test_the_loop_does_not_wait_for_abandoned_work() -> None:
    free = threading.Event()

    async def scenario() -> None:
        task = asyncio.ensure_future(in_thread("abandoned", free.wait))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "abandoned"]
    free.set()
    thread.join(60)
    assert not thread.is_alive()


def test_uninterrupted_work_ends_before_its_cancellation_is_raised() -> None:
    async def scenario() -> list[str]:
        events: list[str] = []
        free = asyncio.Event()

        async def work() -> None:
            await free.wait()
            events.append("done")

        task = asyncio.ensure_future(uninterrupted(work()))
        for _ in range(2):
            await asyncio.sleep(0)
            task.cancel()
        free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return events

    assert asyncio.run(scenario()) == ["done"]
    assert asyncio.run(uninterrupted(_value(3))) == 3
