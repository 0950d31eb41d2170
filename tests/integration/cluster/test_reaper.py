"""Two drivers with a Ray each on one host: one is killed, the other works on, and nothing of the dead one stays."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.core.reaper import TAG_VARIABLE, is_alive, read_environment, read_process
from tests.support import ray_driver
from tests.support.waiting import wait_for_exit, wait_for_round_of, wait_until

GONE_DEADLINE_S = 10.0


class Driver:
    """A driver process and what it said about itself."""

    def __init__(self):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", ray_driver.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def read_facts(self):
        """Wait until everything is up."""
        facts = json.loads(self.process.stdout.readline())
        self.tag, self.temp_dir = facts["tag"], Path(facts["temp_dir"])
        self.segments, self.pids, self.reaper = facts["segments"], facts["pids"], facts["reaper"]
        self.processes = [read_process(pid)[0] for pid in self.pids]

    def ask(self, line):
        """Send a line; return the answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def remains(self):
        """What is left of the run: processes, sockets and files of the temporary folder, shared memory."""
        named = [f"pid {process.pid}" for process in self.processes if is_alive(process)]
        mark = f"{TAG_VARIABLE}={self.tag}".encode()
        tagged = [f"tagged {pid}" for pid in psutil.pids() if mark in (read_environment(pid) or []) and is_running(pid)]
        segments = [name for name in self.segments if Path("/dev/shm", name).exists()]
        others = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(self.tag)]
        folder = [str(self.temp_dir)] if self.temp_dir.exists() else []
        sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if self.tag in line]
        return named + tagged + segments + others + folder + sockets

    def wait_until_gone(self):
        """Wait for the end of the reaper and of all that it ends; return the seconds it took and what remains then."""
        begin = time.monotonic()
        wait_for_exit([self.reaper, *self.pids], GONE_DEADLINE_S)
        with contextlib.suppress(AssertionError):  # The caller says what is left.
            wait_until(lambda: not self.remains(), "nothing remains", GONE_DEADLINE_S - (time.monotonic() - begin))
        return time.monotonic() - begin, self.remains()


def is_running(pid):
    """Whether the process runs (a zombie does not)."""
    found = read_process(pid)
    return found is not None and found[2] not in "ZX"


@pytest.fixture
def drivers():
    """Two drivers at once, both ready."""
    started = [Driver(), Driver()]
    try:
        for driver in started:
            driver.read_facts()
        yield started
    finally:
        for driver in started:
            driver.process.kill()
            driver.process.wait()


def test_a_killed_driver_leaves_nothing_and_its_neighbour_works_on(drivers, record_property):
    killed, neighbour = drivers
    assert killed.tag != neighbour.tag
    assert [driver.ask("call") for driver in drivers] == ["42", "42"]
    wait_for_round_of(killed.reaper)  # What a process maps must be seen while it lives.
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    seconds, left = killed.wait_until_gone()
    assert left == []
    record_property("seconds_until_gone", f"{seconds:.2f}")
    sys.stdout.write(f"gone after {seconds:.2f} s\n")
    assert neighbour.ask("call") == "42"
    report = json.loads(neighbour.ask("stop"))
    assert report["removed"] == [f"{neighbour.tag}-weights"]
    assert str(neighbour.pids[2]) in " ".join(report["ended"])
    neighbour.process.wait(timeout=60)
    assert neighbour.process.returncode == 0
    assert neighbour.wait_until_gone()[1] == []
