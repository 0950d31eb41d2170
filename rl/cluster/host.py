"""The inside of a worker process: builds the plain worker class and calls its methods by name.

It knows no Ray; ray.py makes an actor of it. Errors leave as values (`Failure`), so that they reach the driver as the
exception that was raised, not as the wrapper of a transport.
"""

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import InfraError
from rl.core.imports import import_object


@dataclass(frozen=True)
class HostFacts:
    """Where a worker process runs.

    Attributes:
        pid: Its process number on its node.
        hostname: Name of the node, for messages.
        node: Identity of the node.
        stderr_path: File that holds its standard error, or the empty string.
    """

    pid: int
    hostname: str
    node: str
    stderr_path: str


@dataclass(frozen=True)
class Success:
    """The result of a call."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """The error of a call.

    Attributes:
        pickled: The exception, or None when it does not survive pickling.
        summary: Its type and message.
        trace: The worker's traceback.
    """

    pickled: bytes | None
    summary: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Pack an exception."""
        trace = "".join(traceback.format_exception(error))
        return cls(pickle_error(error), f"{type(error).__name__}: {error}", trace)

    def error(self, where: str) -> Exception:
        """The exception as it was raised, with a note of its place; InfraError when it could not travel."""
        try:
            found: object = None if self.pickled is None else pickle.loads(self.pickled)
        except Exception as problem:  # An exception's class may run anything on unpickling; the text below still tells.
            found = None
            unreadable = f" (its exception could not be rebuilt here: {problem})"
        else:
            unreadable = ""
        if isinstance(found, Exception):
            found.add_note(f"raised in {where}; the worker's traceback:\n{self.trace}")
            return found
        return InfraError(f"{where} failed: {self.summary}{unreadable}\n{self.trace}")


def pickle_error(error: Exception) -> bytes | None:
    """Pickle an exception; None when it cannot be rebuilt from its pickle."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # Whatever a foreign class does here, the text of the error travels instead.
        return None
    return packed


class WorkerHost:
    """One worker process."""

    def __init__(self) -> None:
        self._worker: object | None = None
        self._rendezvous: object | None = None
        temporary = os.environ.get("TMPDIR")
        if temporary is not None:
            # On a node other than the driver's nobody has made the run's folder yet.
            Path(temporary).mkdir(parents=True, exist_ok=True)

    def facts(self, node: str) -> HostFacts:
        """Say where this process runs."""
        target = Path("/proc/self/fd/2")
        path = os.readlink(target) if target.exists() else ""
        return HostFacts(os.getpid(), socket.gethostname(), node, path if path.startswith("/") else "")

    def serve_rendezvous(self, host: str) -> str:
        """Serve the store of the group's collectives on a port that the system chooses; return `host:port`."""
        serve: Any = import_object("rl.cluster.rendezvous:serve_store")
        self._rendezvous, address = serve(host)
        return str(address)

    def build(
        self,
        worker_class: Callable[..., object],
        context: WorkerContext,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Success | Failure:
        """Construct the worker."""
        try:
            self._worker = worker_class(context, *args, **kwargs)
        except Exception as error:  # It leaves as a value; the driver raises it.
            return Failure.of(error)
        return Success(None)

    def invoke_flat(self, method_name: str, keywords: Sequence[str], *values: Any) -> Success | Failure:
        """Call a method of the worker; the last values belong to `keywords`, in order."""
        first = len(values) - len(keywords)
        kwargs = dict(zip(keywords, values[first:], strict=True))
        try:
            return Success(methodcaller(method_name, *values[:first], **kwargs)(self._worker))
        except Exception as error:  # It leaves as a value; the driver raises it.
            return Failure.of(error)


def last_lines(path: str, count: int = 20, longest_bytes: int = 16384) -> str:
    """The last lines of a log file on this host; the empty string when there is none."""
    file = Path(path)
    if not path or not file.is_file():
        return ""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - longest_bytes))
        lines = stream.read().decode(errors="replace").splitlines()
    # Ray writes marker lines such as ":job_id:01000000" between the worker's own.
    markers = (":job_id:", ":actor_name:", ":task_name:")
    spoken = [line for line in lines if line.strip() and not line.startswith(markers)]
    return "\n".join(spoken[-count:])


def death_notice(report: str) -> str:
    """Ray's report of a death in one line, without its ids and its list of common causes.

    It takes ten lines, and each call on a dead worker brings it anew.
    """
    text = " ".join(report.split())
    detail = text.rpartition("Worker exit detail: ")[2]
    seen, has_causes, _ = detail.partition(" Some common causes include")
    return f"{seen} It was killed, perhaps by the kernel for want of memory, or crashed" if has_causes else seen


def memory_shortage(report: str, largest: int = 3) -> str:
    """What matters of Ray's report, of some forty lines, that a host ran out of memory: how much, and who holds it."""
    first, _, rest = report.partition("\n")
    _, found, table = rest.partition("Top 10 memory users:")
    users = [line.split(maxsplit=2) for line in table.splitlines()[1 : largest + 1]]
    named = [f"pid {user[0]} {user[1]} GB ({user[2]:.60})" for user in users if len(user) == 3]
    holders = f"; the largest processes: {', '.join(named)}" if found and named else ""
    return f"{first}{holders}; end what else runs there, or give the run less to hold"
