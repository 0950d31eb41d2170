"""ScorerPool: processes in which rewards are computed, with deadlines that end a computation for real.

Each worker has its own pipe, process and driver-side thread, so no worker can hold up or break another. A worker that
is late, dies or was killed is replaced. The pool knows nothing about rewards.

    pool = ScorerPool("math", num_workers=2, timeout_s=10.0, setup=import_math_verify)
    outcome = await pool.run(score, text, answer)      # never raises for what `score` does
    await pool.close()

Consumes: tasks of `run`. Produces: one Outcome per task. Waits for: a free worker, then at most the deadline.
Unblocked by: the worker's reply, its death, the deadline, or `close`.
"""

import asyncio
import atexit
import enum
import json
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rl.core.errors import ConfigError, InfraError
from rl.environments.scorer_worker import BOOTSTRAP, Reply, Setup

_log = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 5.0
_DYING_S = 0.2


class OutcomeKind(enum.Enum):
    """How a task ended."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Outcome:
    """The end of one task: its value when OK, else what happened."""

    kind: OutcomeKind
    value: Any = None
    detail: str = ""


@dataclass(frozen=True)
class _Task:
    pickled: bytes
    future: "Future[Outcome]"


class ScorerPool:
    """A fixed number of scoring processes behind an asynchronous call."""

    def __init__(
        self,
        name: str,
        num_workers: int,
        timeout_s: float,
        setup: Callable[..., None],
        setup_arguments: tuple[Any, ...] = (),
    ) -> None:
        """Start the workers in the background; `ready` waits for them.

        Args:
            name: For messages.
            num_workers: Processes.
            timeout_s: Deadline of one task from the moment a worker has it, in seconds.
            setup: A module's function that imports what tasks need; not part of any task's deadline.
            setup_arguments: Its arguments.
        """
        self.name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        worker_setup = Setup(setup, setup_arguments, os.getcwd())
        self._slots = [
            _Slot(f"{name}-scorer-{index}", self._tasks, timeout_s, worker_setup, self._closed)
            for index in range(num_workers)
        ]
        atexit.register(self.stop)
        for slot in self._slots:
            slot.thread.start()

    async def ready(self) -> None:
        """Wait until every worker has done its set-up.

        Raises:
            ConfigError: the set-up failed or did not end in time.
        """
        for reply in await asyncio.gather(*(asyncio.wrap_future(slot.first_start) for slot in self._slots)):
            if not reply.ok:
                raise ConfigError(f"the scoring processes of environment '{self.name}' cannot start: {reply.detail}")

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Compute `function(*arguments)` in a worker.

        Args:
            function: A function of a module; arguments and value must be picklable.

        Raises:
            InfraError: the pool is closed.
        """
        if self._closed.is_set():
            raise InfraError(f"the scorer pool '{self.name}' is closed")
        future: Future[Outcome] = Future()
        self._tasks.put(_Task(pickle.dumps((function, arguments)), future))
        return await asyncio.wrap_future(future)

    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [pid for slot in self._slots if (pid := slot.pid) is not None]

    async def close(self) -> None:
        """End the workers; idempotent. Tasks in flight end as errors."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """As `close`, for callers without an event loop."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.stop)
        for slot in self._slots:
            self._tasks.put(None)
            slot.kill()
        for slot in self._slots:
            slot.thread.join(_CLOSE_TIMEOUT_S)
            if slot.thread.is_alive():
                _log.warning("%s did not end within %.0f s", slot.thread.name, _CLOSE_TIMEOUT_S)
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None and task.future.set_running_or_notify_cancel():
                task.future.set_exception(InfraError(f"the scorer pool '{self.name}' was closed"))


class _Slot:
    """One worker and the thread that feeds it; the thread alone starts, talks to and replaces the process."""

    def __init__(
        self,
        name: str,
        tasks: "queue.SimpleQueue[_Task | None]",
        timeout_s: float,
        setup: Setup,
        closed: threading.Event,
    ) -> None:
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._setup = setup
        self._closed = closed
        self._lock = threading.Lock()  # guards _process against `kill` and `pid` from other threads
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lifeline: Connection | None = None
        self.first_start: Future[Reply] = Future()
        self.first_start.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it for the others
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        with self._lock:
            return self._process.pid if self._process is not None and self._process.poll() is None else None

    def kill(self) -> None:
        """End the process at once; whoever waits for its reply sees the end of the pipe."""
        with self._lock:
            if self._process is not None:
                _kill_group(self._process)

    def _serve(self) -> None:
        reply = self._start()
        self.first_start.set_result(reply)
        while (task := self._tasks.get()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                task.future.set_result(self._compute(task))
            except Exception as error:  # a defect of ours: it belongs to the caller, and this thread must live on
                task.future.set_exception(error)
        self._discard()

    def _compute(self, task: _Task) -> Outcome:
        # A worker that was killed while idle is no fault of the task: replace it and hand the task to the new one.
        if self._connection is None or self.pid is None:
            reply = self._start()
            if not reply.ok:
                return Outcome(OutcomeKind.ERROR, detail=f"the scoring process cannot start: {reply.detail}")
        assert self._connection is not None and self._process is not None
        try:
            self._connection.send_bytes(task.pickled)
            if not self._connection.poll(self._timeout_s):
                self.kill()
                self._discard()
                return Outcome(
                    OutcomeKind.TIMEOUT, detail=f"no result within {self._timeout_s:g} s; the process was ended"
                )
            reply = self._connection.recv()
        except (EOFError, OSError):
            return Outcome(OutcomeKind.ERROR, detail=f"the scoring process died ({self._discard()})")
        return Outcome(OutcomeKind.OK, reply.value) if reply.ok else Outcome(OutcomeKind.ERROR, detail=reply.detail)

    def _start(self) -> Reply:
        """Start a fresh process and wait for its set-up, within STARTUP_TIMEOUT_S."""
        self._discard()
        if self._closed.is_set():
            return Reply(ok=False, detail="the pool is closed")
        try:
            self._launch()
        except OSError as error:
            self._discard()
            return Reply(ok=False, detail=f"no process can be started: {error}")
        assert self._connection is not None
        if self._closed.is_set():
            self.kill()
        try:
            if self._connection.poll(STARTUP_TIMEOUT_S):
                reply: Reply = self._connection.recv()
            else:
                reply = Reply(ok=False, detail=f"its set-up did not end within {STARTUP_TIMEOUT_S:.0f} s")
        except (EOFError, OSError):
            reply = Reply(ok=False, detail=f"it died during its set-up ({self._discard()})")
        if not reply.ok:
            self._discard()
        return reply

    def _launch(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        their_lifeline, self._lifeline = multiprocessing.Pipe(duplex=False)
        ends = (theirs.fileno(), their_lifeline.fileno())
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path), *map(str, ends)],
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what a reward function starts can be ended with it
            )
        finally:
            theirs.close()
            their_lifeline.close()
        with self._lock:
            self._process = process
        self._connection.send(self._setup)

    def _discard(self) -> str:
        """End the process, if any, and forget it; return how it ended."""
        with self._lock:
            process, self._process = self._process, None
        status = "not started" if process is None else _end(process)
        for end in (self._connection, self._lifeline):
            if end is not None:
                end.close()
        self._connection = self._lifeline = None
        return status


def _end(process: "subprocess.Popen[bytes]") -> str:
    """End a process with all that it started; one that is dying by itself gets the time to tell its own exit code."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DYING_S)
    _kill_group(process)
    try:
        code = process.wait(_CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "it could not be ended"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
