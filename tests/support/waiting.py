"""Waiting in tests, always with a deadline: for the end of processes, for a round of the reaper, for anything else.

The end of a process is an event of the kernel. Where there is nothing to wait on, `wait_until` looks again and again;
it is the only place of the tests that does.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable

import psutil

LOOK_EVERY_S = 0.02


def wait_for_exit(pids: Iterable[int], deadline_s: float = 10.0) -> None:
    """Wait until all these processes have ended; they need not be children of this one, and zombies have ended.

    Raises:
        AssertionError: some live on past the deadline.
    """
    end = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        for pid in pids:
            try:
                process = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            stack.callback(os.close, process)
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if not poll.poll(max(end - time.monotonic(), 0.0) * 1000):
                raise AssertionError(f"process {pid} lives on after {deadline_s:g} s")


def wait_for_round_of(reaper_pid: int, deadline_s: float = 10.0) -> None:
    """Wait until a run's reaper has begun and ended a look at all processes: it rests once between two of them."""
    reaper = psutil.Process(reaper_pid)
    rests = reaper.num_ctx_switches().voluntary
    wait_until(lambda: reaper.num_ctx_switches().voluntary >= rests + 2, "a round of the reaper", deadline_s)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    """Look until `condition()` holds.

    Raises:
        AssertionError: it never did within the deadline.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not reached within {deadline_s:g} s")
        time.sleep(LOOK_EVERY_S)
