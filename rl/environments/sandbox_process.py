"""The running bubblewrap of one sandbox: read its output within bounds, watch its deadline and memory, end it wholly.

It knows nothing about how the sandbox isolates; see `rl.environments.sandbox`.
"""

import ctypes
import enum
import json
import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from rl.core.errors import InfraError

END_DEADLINE_S = 10.0
LOOK_EVERY_S = 0.05
_CHUNK_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class Ending(enum.Enum):
    """Why a program ended."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output_limit"


class SandboxProcess:
    """One bubblewrap process and, below it, the first process of the sandbox, with whose end everything in it ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", info: IO[bytes], output_bytes: int) -> None:
        """Take over a process that was just started.

        Args:
            process: bubblewrap, with pipes as standard output and error.
            info: Where it writes the pid of the sandbox's first process.
            output_bytes: Most bytes to keep of both outputs together.
        """
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self._info = info
        self._output_bytes = output_bytes
        self._kept: dict[int, bytearray] = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr)}
        self._seen_bytes = 0
        self._told = b""
        self._first_pid: int | None = None
        self._first: int | None = None  # a pidfd: a number may be given to another process, this may not
        for descriptor in self._kept:
            os.set_blocking(descriptor, False)

    def watch(self, deadline: float, memory_bytes: int, files: int) -> Ending:
        """Wait until the program ends by itself or meets a limit; it may still run then.

        Args:
            deadline: By `time.monotonic()`.
            memory_bytes: Most memory of all its processes together; looked at every LOOK_EVERY_S.
            files: Most files in its /tmp; looked at as often.
        """
        outer = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as selector:
            try:
                for descriptor in (outer, *self._kept, self._info.fileno()):
                    selector.register(descriptor, selectors.EVENT_READ)
                while (left := deadline - time.monotonic()) > 0:
                    ready = {key.fd for key, _ in selector.select(min(left, LOOK_EVERY_S))}
                    self._take(ready, selector)
                    if self._seen_bytes > self._output_bytes:
                        return Ending.OUTPUT
                    if outer in ready:
                        return Ending.EXITED
                    if self._first_pid is not None and (
                        resident_bytes(self._first_pid) > memory_bytes or files_in_tmp(self._first_pid) > files
                    ):
                        return Ending.MEMORY
                return Ending.TIMEOUT
            finally:
                os.close(outer)

    def end(self) -> int:
        """End what still runs, wait until nothing does, take what was written; idempotent.

        Returns:
            bubblewrap's exit code: the program's own, if it ended by itself.

        Raises:
            InfraError: something lives on.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        deadline = time.monotonic() + END_DEADLINE_S
        while self._first is None and is_readable(self._info.fileno(), deadline) and self._learn_first():
            pass
        if self._first is None:
            self._process.kill()  # it has started nothing
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            self._await_first(deadline)
        try:
            code = self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            raise InfraError(f"bubblewrap (pid {self._process.pid}) did not end within {END_DEADLINE_S:g} s") from error
        for descriptor in self._kept:
            while self._read(descriptor):
                pass
        return code

    def outputs(self) -> tuple[str, str]:
        """What was written on standard output and standard error; bytes that are no UTF-8 are replaced."""
        stdout, stderr = (bytes(kept).decode(errors="replace") for kept in self._kept.values())
        return stdout, stderr

    @property
    def wrote_too_much(self) -> bool:
        """Whether there was more output than was kept."""
        return self._seen_bytes > self._output_bytes

    def _take(self, ready: set[int], selector: selectors.BaseSelector) -> None:
        for descriptor in self._kept:
            if descriptor in ready and not self._read(descriptor):
                selector.unregister(descriptor)
        if self._info.fileno() in ready and not self._learn_first():
            selector.unregister(self._info.fileno())

    def _read(self, descriptor: int) -> bool:
        """Keep what the pipe has; return whether it may bring more."""
        try:
            found = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        room = self._output_bytes - sum(map(len, self._kept.values()))
        self._kept[descriptor] += found[:room]
        self._seen_bytes += len(found)
        return bool(found)

    def _learn_first(self) -> bool:
        """Read of the pid of the sandbox's first process what there is; return whether more is to come."""
        found = os.read(self._info.fileno(), _CHUNK_BYTES)
        self._told += found
        if found and not self._told.rstrip().endswith(b"}"):
            return True
        told, self._told = self._told, b""
        if told:
            self._first_pid = int(json.loads(told)["child-pid"])
            with suppress(ProcessLookupError):
                self._first = os.pidfd_open(self._first_pid)
        return False

    def _await_first(self, deadline: float) -> None:
        """Wait for the end of the sandbox's first process: the kernel has ended all others by then."""
        assert self._first is not None and self._first_pid is not None
        is_over = is_readable(self._first, deadline)
        os.close(self._first)
        self._first = None
        if not is_over:
            raise InfraError(f"the sandbox's processes (under pid {self._first_pid}) cannot be ended")
        if self._process.poll() is not None:
            # bubblewrap ends before its child, which init inherits, or this process if it adopts orphans.
            with suppress(ChildProcessError):
                os.waitpid(self._first_pid, os.WNOHANG)


def adopt_orphans() -> None:
    """Let this process inherit, and so bury, what its children leave: not every container's first process does."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise InfraError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")


def is_readable(descriptor: int, deadline: float) -> bool:
    """Wait until there is something to read, or the end of it; False at the deadline, by `time.monotonic()`."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(max(deadline - time.monotonic(), 0.0)))


def resident_bytes(pid: int) -> int:
    """Memory that a process and its descendants hold for themselves; the ones that have ended count as nothing."""
    pages, waiting = 0, [pid]
    while waiting:
        folder = f"/proc/{waiting.pop()}"
        try:
            fields = Path(folder, "statm").read_text().split()
            pages += int(fields[1]) - int(fields[2])
            for thread in os.scandir(f"{folder}/task"):
                waiting += map(int, Path(thread, "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def files_in_tmp(pid: int) -> int:
    """Files and folders in the /tmp that a process sees; 0 while it still sees ours, or when it has ended.

    Each takes kernel memory that neither the size of /tmp nor the limits of a process count.
    """
    root = f"/proc/{pid}/root"
    try:
        if os.stat(root).st_dev == os.stat("/").st_dev:
            return 0
        found = os.statvfs(f"{root}/tmp")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return found.f_files - found.f_ffree
