"""What runs inside a scoring process: take a task, compute it, send the outcome back, until the driver is gone.

It imports nothing heavy; what a task needs is imported by the set-up function of its pool.
"""

import fcntl
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# What `python -c` runs, with the driver's sys.path and two descriptors as arguments. A new interpreter, and neither a
# fork nor multiprocessing: those would run the driver's main script again, share its threads' locks or need sockets.
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rl.environments.scorer_worker import worker_main; worker_main(int(sys.argv[2]), int(sys.argv[3]))"
)

# Most characters of a foreign error; they go to the log, once for each sample.
_MAX_WORDS = 2000


@dataclass(frozen=True)
class Setup:
    """What a scoring process does before its first task.

    Attributes:
        function: A function of a module, called once with `arguments`; it imports what the tasks need.
        arguments: Its arguments.
        folder: Where the process stands; also searched for the user's modules, after everything else.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    folder: str


@dataclass(frozen=True)
class Reply:
    """The answer to a task or to the set-up: `value` when ok, else `detail` with the error and its place."""

    ok: bool
    value: Any = None
    detail: str = ""

    def pickled(self) -> bytes:
        """Return this reply as bytes; a value that cannot be pickled becomes an error."""
        try:
            return pickle.dumps(self)
        except Exception as error:  # a boundary: the value's own code runs here
            return pickle.dumps(Reply(ok=False, detail=f"the result cannot be sent back: {_describe(error)}"))


def worker_main(tasks_descriptor: int, lifeline_descriptor: int) -> None:
    """Serve tasks until the driver closes the pipe or ends; the first message is the Setup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business; it ends us in its own order
    die_with(lifeline_descriptor)
    tasks = Connection(tasks_descriptor)
    own_pid = os.getpid()
    reply = _run(_set_up, (tasks.recv_bytes(),))
    _send(tasks, reply, own_pid)
    while reply.ok:
        try:
            pickled = tasks.recv_bytes()
        except EOFError:
            return
        _send(tasks, _run(_call, (pickled,)), own_pid)


def _send(tasks: Connection, reply: Reply, own_pid: int) -> None:
    """Answer the driver, unless this is a fork that foreign code forgot: it would answer the next task."""
    if os.getpid() != own_pid:
        os._exit(0)
    tasks.send_bytes(reply.pickled())


def die_with(descriptor: int) -> None:
    """Let the kernel end this process and its group when the other end of the pipe `descriptor` closes.

    SIGIO ends a process by default and needs no interpreter: it also ends one that computes a huge power and never
    comes back to Python, where a watching thread would never run.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


def _set_up(pickled: bytes) -> None:
    setup: Setup = pickle.loads(pickled)
    os.chdir(setup.folder)
    if setup.folder not in sys.path:
        sys.path.append(setup.folder)
    setup.function(*setup.arguments)


def _call(pickled: bytes) -> Any:
    function, arguments = pickle.loads(pickled)
    return function(*arguments)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Reply:
    """Call foreign code; whatever it raises, SystemExit included, is an outcome and not our end."""
    try:
        return Reply(ok=True, value=function(*arguments))
    except BaseException as error:  # noqa: B036
        return Reply(ok=False, detail=_describe(error))


def _describe(error: BaseException) -> str:
    words = _words_of(error)
    text = f"{type(error).__name__}: {words[:_MAX_WORDS]}{' ... (cut)' if len(words) > _MAX_WORDS else ''}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} (at {last.filename}:{last.lineno} in {last.name})"


def _words_of(error: BaseException) -> str:
    """Return the text of a foreign exception, whose own code may fail in turn."""
    try:
        return str(error)
    except BaseException as failure:  # noqa: B036 - as in _run
        return f"(no text: its __str__ raised {type(failure).__name__})"
