"""Plain worker classes that behave, fail, hang and die: for tests of worker groups."""

import os
import signal
import subprocess
import sys
import threading
import time

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import ConfigError, DataError
from rl.core.imports import import_object


class EchoWorker:
    """A worker that shows what it was given."""

    def __init__(self, context: WorkerContext, offset: int = 0) -> None:
        self.context = context
        self.offset = offset
        self.gate = threading.Event()
        self.child: subprocess.Popen[bytes] | None = None

    def add(self, value: int, more: int = 0) -> int:
        """Return the sum with the worker's rank and offset."""
        return value + more + self.offset + self.context.rank

    def show_context(self) -> WorkerContext:
        """Return the context."""
        return self.context

    def environment(self) -> dict[str, str]:
        """Return the environment of the worker's process."""
        return dict(os.environ)

    def pid(self) -> int:
        """Return the process number."""
        return os.getpid()

    def size(self, value: bytes) -> int:
        """Return the length of the argument."""
        return len(value)

    def bad_data(self) -> None:
        """Raise an error of ours."""
        raise DataError("sample 7 is empty; drop it")

    def bug(self) -> None:
        """Raise a plain error."""
        raise ZeroDivisionError("a bug")

    def unpicklable(self) -> None:
        """Raise an error that cannot travel."""

        class Local(Exception):
            pass

        raise Local("cannot travel")

    def leave(self) -> None:
        """End the process by SystemExit."""
        raise SystemExit(3)

    def wait_for_gate(self) -> str:
        """Return when `open_gate` was called."""
        self.gate.wait(60)
        return "open"

    def open_gate(self) -> None:
        """Let `wait_for_gate` return."""
        self.gate.set()

    def hang(self) -> None:
        """Sleep far longer than any test."""
        time.sleep(60)

    def start_child(self) -> int:
        """Start a process that would outlive the worker; return its number."""
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        return self.child.pid

    def die(self) -> None:
        """Write last words and die like a process that the kernel ends."""
        sys.stderr.write("the last words of a dying worker\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def meet(self) -> list[str]:
        """Exchange ranks with the other workers through the group's store."""
        # By path: most tests need no torch, and importing it costs each worker process seconds.
        store = import_object("rl.cluster.rendezvous:connect_store")(self.context, timeout_s=20.0)
        store.set(f"rank{self.context.rank}", str(self.context.rank))
        return [store.get(f"rank{rank}").decode() for rank in range(self.context.world_size)]


class RefusingWorker:
    """A worker whose constructor fails in the way that its argument names."""

    def __init__(self, context: WorkerContext, manner: str) -> None:
        sys.stderr.write(f"{context.name} tries to start\n")
        sys.stderr.flush()
        if manner == "config":
            raise ConfigError("policy.model_name='nowhere' does not exist; give a folder")
        if manner == "bug":
            raise ValueError("a bug in the constructor")
        if manner == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if manner == "hang":
            time.sleep(60)
