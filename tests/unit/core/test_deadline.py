"""Tests of rl.core.deadline, in virtual time."""

import asyncio

import pytest

from rl.core.deadline import within
from rl.core.errors import InfraError
from tests.support.clock import FakeClock


async def test_work_in_time_returns_its_result_and_leaves_no_timer() -> None:
    async def work() -> int:
        await clock.sleep(4.0)
        return 7

    clock = FakeClock()
    assert await clock.run(within(clock, 5.0, "the work", work())) == 7
    assert clock.now() == 4.0


async def test_late_work_is_cancelled_and_named() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await clock.sleep(1e9)
        finally:
            ended.append("cancelled")

    clock = FakeClock()
    with pytest.raises(InfraError, match="the work did not end within 5 s"):
        await clock.run(within(clock, 5.0, "the work", work()))
    await clock.settle()
    assert ended == ["cancelled"]


async def test_an_error_of_the_work_arrives_unchanged() -> None:
    async def work() -> None:
        raise ValueError("mine")

    clock = FakeClock()
    with pytest.raises(ValueError, match="mine"):
        await clock.run(within(clock, 5.0, "the work", work()))


async def test_a_cancelled_wait_cancels_the_work() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    clock = FakeClock()
    task = asyncio.ensure_future(within(clock, 5.0, "the work", work()))
    await clock.settle()
    task.cancel()
    await clock.settle()
    assert ended == ["cancelled"]
