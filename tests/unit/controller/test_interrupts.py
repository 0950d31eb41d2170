"""Tests of rl.controller.interrupts, with real signals to this process."""

import asyncio
import os
import signal

import pytest

from rl.controller import interrupts
from rl.controller.interrupts import EXIT_INTERRUPTED, Interrupts
from rl.controller.stop import StopSignal


async def until_stopped(stop: StopSignal) -> None:
    """The wait of a run that lets its phase end."""
    while not stop.requested:
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_asks_for_a_clean_stop(number: signal.Signals) -> None:
    said: list[str] = []
    stop = StopSignal()
    with Interrupts(stop, said.append, lambda: None, 60.0) as handler:
        handler.set_up_is_over()
        os.kill(os.getpid(), number)
        await until_stopped(stop)
    assert said == [f"{number.name}: stopping cleanly (again to stop at once)"]


async def test_a_signal_during_the_set_up_cancels_it() -> None:
    stop = StopSignal()

    async def set_up() -> None:
        with Interrupts(stop, lambda _: None, lambda: None, 60.0):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(set_up())
    assert stop.requested


async def test_a_stop_that_takes_too_long_is_enforced() -> None:
    stop = StopSignal()

    async def run() -> None:
        with Interrupts(stop, lambda _: None, lambda: None, 0.0) as handler:
            handler.set_up_is_over()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(run())


async def test_the_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    events: list[str] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    stop = StopSignal()
    handler = Interrupts(stop, events.append, lambda: events.append("last words"), 60.0)
    handler._on_signal("SIGINT")
    monkeypatch.setattr(interrupts, "SAME_REQUEST_S", 0.0)
    with pytest.raises(SystemExit):
        handler._on_signal("SIGINT")
    assert ended == [EXIT_INTERRUPTED]
    assert events[1:] == ["SIGINT again: ending at once", "last words"]


async def test_one_request_that_is_delivered_twice_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended at once"))
    said: list[str] = []
    handler = Interrupts(StopSignal(), said.append, lambda: None, 60.0)
    handler._on_signal("SIGTERM")
    handler._on_signal("SIGTERM")
    assert len(said) == 1
