"""The running bubblewrap of one sandbox: read its output within bounds, watch its deadline and memory, end it wholly.

It knows nothing about how the sandbox isolates; see `rl.environments.sandbox`.
"""

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
        self._first_pid: int | None = None
        self._first: int | None = None  # a pidfd: a number may be given to another process, this may not
        for descriptor in self._kept:
            os.set_blocking(descriptor, False)

    def watch(self, deadline: float, memory_bytes: int) -> Ending:
        """Wait until the program ends by itself or meets a limit; it may still run then.

        Args:
            deadline: By `time.monotonic()`.
            memory_bytes: Most memory of all its processes together; looked at every LOOK_EVERY_S.
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
                    if self._first_pid is not None and resident_bytes(self._first_pid) > memory_bytes:
                        return Ending.MEMORY
                return Ending.TIMEOUT
            finally:
                os.close(outer)

    def end(self) -> int:
        """End what still runs, wait until nothing does, take what was written; return bubblewrap's exit code.

        Raises:
            InfraError: something lives on.
        """
        if self._first is None and self._process.poll() is None:
            self._learn_first(END_DEADLINE_S)
        self._process.kill()
        if self._first is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            self._await_first()
        try:
            code = self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise InfraError(f"bubblewrap (pid {self._process.pid}) cannot be ended") from error
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
        if self._info.fileno() in ready:
            selector.unregister(self._info.fileno())
            self._learn_first(0.0)

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

    def _learn_first(self, timeout_s: float) -> None:
        """Read the pid of the sandbox's first process; bubblewrap writes it in one piece, or ends without."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._info, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return
        written = os.read(self._info.fileno(), _CHUNK_BYTES)
        if not written.rstrip().endswith(b"}"):
            return
        pid = json.loads(written)["child-pid"]
        with suppress(ProcessLookupError):
            self._first = os.pidfd_open(pid)
            self._first_pid = pid

    def _await_first(self) -> None:
        assert self._first is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._first, selectors.EVENT_READ)
            is_over = bool(selector.select(END_DEADLINE_S))
        os.close(self._first)
        pid, self._first, self._first_pid = self._first_pid, None, None
        if not is_over:
            raise InfraError(f"the sandbox's processes (under pid {pid}) cannot be ended")


def resident_bytes(pid: int) -> int:
    """Memory that a process and its descendants hold for themselves; the ones that have ended count as nothing."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        own = (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
        below = [Path(entry, "children").read_text().split() for entry in os.scandir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return own + sum(resident_bytes(int(child)) for children in below for child in children)
