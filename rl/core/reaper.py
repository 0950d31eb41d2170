"""The process that cleans up after a run, however the run's driver ends.

It is started by `rl.core.resources` as a script of its own (standard library only, own session). It watches the driver,
and when the driver is gone or says `done` it ends what the run left behind: processes, shared memory, temporary folder.
It owns a process when the environment of that process carries the run's tag, or, once the driver is dead, when it was
seen as a descendant of the driver. It never touches anything else, and it does not decide when a run is over.

Protocol: one JSON line of settings on stdin, then `done` or end of file; one JSON line with the result on stdout.
"""

import json
import os
import re
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TAG_VARIABLE = "TANDEM_RUN_TAG"
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 1.0
TERMINATE_GRACE_S = 1.5
SWEEP_DEADLINE_S = 8.0
SWEEP_PAUSE_S = 0.1
# An environment can change once after the first sight of a process: between fork and exec.
YOUNG_S = 5.0
# Segments that libraries create under names of their own. Only these may be removed without the run's tag in the name:
# a user may well keep a model in /dev/shm and map it.
FOREIGN_SEGMENTS = re.compile(r"^(psm_|sem\.|wnsm_|torch_|nccl-|cuda\.shm\.|plasma|vllm|__KMP_REGISTERED_LIB_)")


@dataclass(frozen=True)
class Process:
    """A process, safe against reuse of its number."""

    pid: int
    started: int


def read_process(pid: int) -> tuple[Process, int, str] | None:
    """Return the process, the pid of its parent, and its state letter; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid, int(fields[19])), int(fields[1]), fields[0]


def is_alive(process: Process) -> bool:
    """Whether the process still runs (a zombie does not)."""
    found = read_process(process.pid)
    return found is not None and found[0] == process and found[2] not in "ZX"


def read_environment(pid: int) -> list[bytes] | None:
    """Return `NAME=value` of each variable; None when the process has ended or is somebody else's.

    A program shows no variables in the middle of exec, when its parent may run on already, and while it ends.
    """
    return read_strings(Path(f"/proc/{pid}/environ"))


def read_strings(path: Path) -> list[bytes] | None:
    """Return the strings of a file of /proc that ends each with a zero byte; None when it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content.split(b"\0") if content else []


def mapped_segments(pid: int) -> set[str]:
    """Names directly under /dev/shm that the process has mapped and that still exist.

    Compared by inode: a named semaphore is mapped under a temporary name, which is gone when its own name appears.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    prefix = f"{SHARED_MEMORY}/"
    inodes = {int(line.split(maxsplit=5)[4]) for line in lines if prefix in line}
    if not inodes:
        return set()
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name for entry in entries if entry.inode() in inodes}


@dataclass
class Reaper:
    """What is known of one run."""

    tag: str
    temp_dir: Path
    driver: Process
    started_at: float
    tagged: set[Process] = field(default_factory=set)
    descendants: set[Process] = field(default_factory=set)
    tagged_segments: set[str] = field(default_factory=set)
    driver_segments: set[str] = field(default_factory=set)
    starting: set[Process] = field(default_factory=set)
    _first_seen: dict[Process, float] = field(default_factory=dict)

    def scan(self) -> None:
        """Look at new processes; remember the tagged ones, the driver's descendants, and which of them still start."""
        itself, now = os.getpid(), time.monotonic()
        parents: dict[int, tuple[Process, int]] = {}
        for entry in os.listdir("/proc"):
            found = read_process(int(entry)) if entry.isdigit() and int(entry) != itself else None
            if found is not None:
                parents[found[0].pid] = (found[0], found[1])
        self._first_seen = {process: self._first_seen.get(process, now) for process, _ in parents.values()}
        self.tagged = {process for process in self.tagged if process in self._first_seen}
        self.descendants = {process for process in self.descendants if process in self._first_seen}
        mark = f"{TAG_VARIABLE}={self.tag}".encode()
        unreadable = set()
        for process, _ in parents.values():
            if process == self.driver or process in self.tagged or now - self._first_seen[process] > YOUNG_S:
                continue
            environment = read_environment(process.pid)
            if environment and mark in environment:
                self.tagged.add(process)
            elif environment == []:
                unreadable.add(process)
        for process, _ in parents.values():
            if process != self.driver:
                self._classify(process, parents)
        self.starting = {process for process in unreadable & self.descendants if is_alive(process)}
        for process in self.tagged:
            self.tagged_segments |= mapped_segments(process.pid)
        for process in {self.driver} | self.descendants:
            self.driver_segments |= mapped_segments(process.pid)

    def _classify(self, process: Process, parents: dict[int, tuple[Process, int]]) -> None:
        """Walk up from `process`; a child of a tagged process is tagged, a child of the driver a descendant."""
        step: tuple[Process, int] | None = parents.get(parents[process.pid][1])
        while step is not None and step[0].pid > 1:
            if step[0] in self.tagged:
                self.tagged.add(process)
                return
            if step[0] == self.driver or step[0] in self.descendants:
                self.descendants.add(process)
                return
            step = parents.get(step[1])

    def wait_for_end(self) -> bool:
        """Scan until the driver is done or dead; return True when it is dead."""
        listening = True
        while os.getppid() == self.driver.pid and is_alive(self.driver):
            self.scan()
            ready, _, _ = select.select([sys.stdin] if listening else [], [], [], POLL_S)
            if ready:
                line = sys.stdin.readline()
                if line.strip() == "done":
                    return False
                listening = line != ""
        return True

    def sweep(self, driver_is_dead: bool) -> dict[str, list[str]]:
        """End the run's processes, then remove its shared memory and temporary folder."""
        ended = self._end_processes(driver_is_dead)
        removed = self._remove_segments(driver_is_dead)
        for _ in range(5):
            if not self.temp_dir.exists():
                break
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        return {"ended": ended, "removed": removed}

    def _end_processes(self, driver_is_dead: bool) -> list[str]:
        ended: dict[Process, str] = {}
        begin = time.monotonic()
        # Of a dead driver, new children have no parent that tells: a second look shows their environment.
        looks = 2 if driver_is_dead else 1
        while looks and time.monotonic() - begin < SWEEP_DEADLINE_S:
            self.scan()
            owned = self.tagged | (self.descendants if driver_is_dead else set())
            is_late = time.monotonic() - begin >= TERMINATE_GRACE_S
            alive = [process for process in owned if is_alive(process) and not self._serves_driver(process)]
            looks -= not alive and not self.starting
            number = signal.SIGKILL if is_late else signal.SIGTERM
            for process in alive:
                # Without a command line it is about to become something else or to end: look again.
                if not is_late and read_strings(Path(f"/proc/{process.pid}/cmdline")) == []:
                    continue
                ended.setdefault(process, process_name(process.pid))
                send_signal(process, number)
            if looks:
                time.sleep(SWEEP_PAUSE_S)
        return [f"{process.pid} {name}" for process, name in ended.items()]

    def _serves_driver(self, process: Process) -> bool:
        """Whether this is Python's resource tracker of a driver that lives on; it ends with the driver by itself."""
        found = read_process(process.pid)
        if found is None or found[1] != self.driver.pid or not is_alive(self.driver):
            return False
        command = read_strings(Path(f"/proc/{process.pid}/cmdline"))
        return any(b"multiprocessing.resource_tracker" in word for word in command or [])

    def _remove_segments(self, driver_is_dead: bool) -> list[str]:
        """Remove tagged names, and foreign-named segments of our processes that nobody else has mapped."""
        if not SHARED_MEMORY.is_dir():
            return []
        known = self.tagged_segments | (self.driver_segments if driver_is_dead else set())
        candidates = {name for name in known if FOREIGN_SEGMENTS.match(name)}
        in_use: set[str] = set()
        for entry in os.listdir("/proc") if candidates else []:
            if entry.isdigit():
                in_use |= mapped_segments(int(entry))
        removed = []
        for path in SHARED_MEMORY.iterdir():
            is_ours = path.name.startswith(self.tag) or (path.name in candidates - in_use and self._is_recent(path))
            if is_ours and remove_path(path):
                removed.append(path.name)
        return removed

    def _is_recent(self, path: Path) -> bool:
        try:
            status = path.lstat()
        except OSError:
            return False
        return status.st_uid == os.getuid() and status.st_ctime >= self.started_at


def process_name(pid: int) -> str:
    """The short name of a process, for the report."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signal the process unless it ended meanwhile or belongs to somebody else."""
    try:
        if is_alive(process):
            os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def remove_path(path: Path) -> bool:
    """Remove a file, socket or folder; whether this call removed it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    return True


def main() -> None:
    """Serve one run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    driver = Process(settings["driver_pid"], settings["driver_started"])
    reaper = Reaper(settings["tag"], Path(settings["temp_dir"]), driver, settings["started_at"])
    report = reaper.sweep(driver_is_dead=reaper.wait_for_end())
    try:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(0)  # The reader died with the driver; there is nobody to tell.


if __name__ == "__main__":
    main()
