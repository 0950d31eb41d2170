"""Work that hangs neither keeps the process alive nor leaves behind what it started."""

import asyncio
import subprocess
import sys
import threading

import pytest

from rl.cluster.daemon_pool import DaemonPool, run_or_undo

_HANGS = """
import asyncio, threading
from rl.cluster.daemon_pool import DaemonPool, run_or_undo
try:
    asyncio.run(run_or_undo(DaemonPool("hanging", 1), threading.Event().wait, print, 0.05))
except TimeoutError:
    print("late")
"""


def test_a_start_that_hangs_does_not_keep_the_process_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["late"]


async def test_a_result_arrives_and_is_not_undone() -> None:
    undone: list[bool] = []
    pool = DaemonPool("pool", 1)
    assert await run_or_undo(pool, lambda: 7, lambda: undone.append(True), 10.0) == 7
    pool.close()
    assert not undone


@pytest.mark.parametrize("ending", ["cancelled", "late"])
async def test_what_nobody_waits_for_any_longer_is_undone_once_it_is_there(ending: str) -> None:
    began, may_end, undone = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        began.set()
        may_end.wait(20)
        order.append("started")

    def undo() -> None:
        order.append("undone")
        undone.set()

    pool = DaemonPool("pool", 1)
    pool.submit(lambda: None).result(20)  # Its thread is there: what is cancelled has begun.
    waiting = asyncio.ensure_future(run_or_undo(pool, work, undo, 0.5 if ending == "late" else 20.0))
    if ending == "cancelled":
        await asyncio.to_thread(began.wait, 20)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError if ending == "cancelled" else TimeoutError):
        await waiting
    may_end.set()
    assert await asyncio.to_thread(undone.wait, 20)
    assert order == ["started", "undone"]


async def test_an_error_is_raised_as_it_is_and_undone() -> None:
    undone = threading.Event()
    with pytest.raises(ZeroDivisionError):
        await run_or_undo(DaemonPool("pool", 1), lambda: 1 // 0, undone.set, 10.0)
    assert await asyncio.to_thread(undone.wait, 20)
