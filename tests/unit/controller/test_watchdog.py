"""Tests of rl.controller.watchdog, in virtual time."""

import asyncio
import logging

import pytest

from rl.controller.watchdog import Progress, Watchdog
from rl.core.errors import StallError
from rl.rollout.config import StallWatchdogConfig
from tests.support.clock import FakeClock


def make(action: str = "abort") -> StallWatchdogConfig:
    return StallWatchdogConfig.model_validate({"interval_s": 10.0, "stall_timeout_s": 60.0, "stall_action": action})


async def watch(clock: FakeClock, watchdog: Watchdog, seconds: float) -> None:
    task = asyncio.ensure_future(watchdog.run())
    try:
        await clock.run(_until(clock, task, seconds))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(clock: FakeClock, task: "asyncio.Task[None]", seconds: float) -> None:
    timer = asyncio.ensure_future(clock.sleep(seconds))
    await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
    timer.cancel()
    if task.done():
        task.result()


async def test_nothing_happens_while_something_moves(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    looks: list[Progress] = []

    def look() -> Progress:
        looks.append(Progress((int(clock.now() // 50),), "x", None))
        return looks[-1]

    await watch(clock, Watchdog(make(), look, clock), 1000.0)
    assert clock.now() == 1000.0
    assert len(looks) >= 100, "it looks every 10 s and did not end"
    assert len({progress.counter for progress in looks}) >= 20
    assert caplog.records == []


async def test_a_stall_names_what_is_awaited() -> None:
    clock = FakeClock()

    def look() -> Progress:
        return Progress((1,), "exposed_generation in step 4 (3 groups in flight)", None)

    with pytest.raises(StallError, match=r"70 s while waiting for exposed_generation in step 4 \(3 groups in flight\)"):
        await watch(clock, Watchdog(make(), look, clock), 1000.0)


async def test_a_long_phase_has_its_own_deadline() -> None:
    clock = FakeClock()
    await watch(clock, Watchdog(make(), lambda: Progress((1,), "policy_training", 500.0), clock), 500.0)
    with pytest.raises(StallError, match="policy_training"):
        await watch(clock, Watchdog(make(), lambda: Progress((1,), "policy_training", 500.0), clock), 600.0)


async def test_warn_says_it_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with caplog.at_level(logging.WARNING):
        await watch(clock, Watchdog(make("warn"), lambda: Progress((1,), "the moon", None), clock), 1000.0)
    said = [record.message for record in caplog.records if "the moon" in record.message]
    assert len(said) == 1
    assert said[0].startswith("nothing has moved for 70 s while waiting for the moon; going on")
