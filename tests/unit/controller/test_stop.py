"""Tests of rl.controller.stop."""

import asyncio

import pytest

from rl.controller.stop import RunStopped, StopSignal
from tests.support.clock import FakeClock


async def test_a_guarded_wait_returns_its_result() -> None:
    async def work() -> int:
        return 7

    assert await StopSignal().guard(work()) == 7


async def test_a_stop_abandons_the_wait_and_cancels_it() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    stop = StopSignal()
    guarded = asyncio.ensure_future(stop.guard(work()))
    await FakeClock().settle()
    stop.request()
    with pytest.raises(RunStopped):
        await guarded
    assert ended == ["cancelled"]
    assert stop.requested


async def test_an_error_of_the_work_arrives_unchanged() -> None:
    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await StopSignal().guard(work())
