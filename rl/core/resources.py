"""What a run owns on its host: its tag, its temporary folder, its names in shared memory, its threads, and its reaper.

A run is marked by a short unique tag, which every process of the run carries in its environment. The reaper, a tiny
process beside the driver, ends whatever still carries the tag once the driver is gone, also after SIGKILL. This file
knows neither Ray nor torch.

    with RunResources.create() as run:
        environment = run.environment()      # for the run's processes
        name = run.shm_name("weights")       # "tdm-1f2e3d4c-weights"
"""

import json
import multiprocessing
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl.core.errors import ConfigError, InfraError
from rl.core.reaper import TAG_VARIABLE, read_process

# Room for Ray's socket paths below the temporary folder: a unix socket's path holds 107 bytes.
LONGEST_TEMP_DIR = 40
REAPER_DEADLINE_S = 15.0
MULTIPROCESSING_FOLDER = "tempdir"


@dataclass(frozen=True)
class SweepReport:
    """What the reaper found at the end of a run.

    Attributes:
        ended: `pid name` of each process that it had to end.
        removed: Names of the shared memory segments that it removed.
    """

    ended: list[str]
    removed: list[str]


@dataclass
class ReaperHandle:
    """The driver's end of the reaper process."""

    process: "subprocess.Popen[str]"
    report: SweepReport | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(self) -> SweepReport:
        """Tell the reaper that the run is over and wait for its sweep; idempotent.

        Raises:
            InfraError: it did not finish in time.
        """
        with self.lock:
            if self.report is None:
                self.report = self._sweep()
            return self.report

    def _sweep(self) -> SweepReport:
        try:
            output, _ = self.process.communicate("done\n", timeout=REAPER_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise InfraError(
                f"the run's cleaner (pid {self.process.pid}) did not finish within {REAPER_DEADLINE_S:.0f} s; "
                f"look for processes with {TAG_VARIABLE} in their environment"
            ) from error
        if not output:
            return SweepReport([], [])
        values = json.loads(output)
        return SweepReport(ended=values["ended"], removed=values["removed"])


@dataclass(frozen=True)
class RunResources:
    """The marks of one run.

    Attributes:
        tag: `tdm-<8 hex digits>`; prefix of every shared memory segment and socket.
        temp_dir: The run's temporary folder; a short path, because sockets live below it.
        reaper: The cleaner of the run; None for resources made by hand, as in tests.
        outer: What this process had in the place of the run's marks before.
    """

    tag: str
    temp_dir: Path
    reaper: ReaperHandle | None = field(default=None, repr=False, compare=False)
    outer: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def create(cls, parent: Path | None = None) -> Self:
        """Choose a tag, make the temporary folder, mark this process's children, and start the reaper.

        Args:
            parent: Folder of the temporary folder; None takes /tmp.

        Raises:
            ConfigError: the path would be too long for sockets, or the folder cannot be made.
        """
        parent = parent if parent is not None else default_parent()
        tag = f"tdm-{secrets.token_hex(4)}"
        temp_dir = parent / tag
        if len(os.fsencode(temp_dir)) > LONGEST_TEMP_DIR:
            raise ConfigError(
                f"temporary folder {temp_dir} has {len(os.fsencode(temp_dir))} characters; sockets below it allow "
                f"{LONGEST_TEMP_DIR}; choose a shorter parent such as /tmp"
            )
        try:
            temp_dir.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"cannot make the run's temporary folder {temp_dir}: {error}; free it") from error
        run = cls(tag=tag, temp_dir=temp_dir, reaper=start_reaper(tag, temp_dir))
        run.outer.update(exchange_environment(run.marks()))
        run.outer[MULTIPROCESSING_FOLDER] = exchange_multiprocessing_folder(str(temp_dir))
        return run

    def marks(self) -> dict[str, str]:
        """Environment of the children of the driver: the reaper knows them by it, and their sockets are ours."""
        # Without SPT_NOENV a process that sets its title overwrites the environment that /proc shows. vLLM puts its
        # sockets into the folder of VLLM_RPC_BASE_PATH.
        return {TAG_VARIABLE: self.tag, "SPT_NOENV": "1", "VLLM_RPC_BASE_PATH": str(self.temp_dir)}

    def environment(self) -> dict[str, str]:
        """Environment variables that every worker process of the run gets."""
        return self.marks() | {"TMPDIR": str(self.temp_dir)}

    def shm_name(self, label: str) -> str:
        """Name of a shared memory segment of this run (no slash)."""
        return f"{self.tag}-{label}"

    def close(self) -> SweepReport:
        """End what the run left behind and remove its temporary folder; idempotent.

        Raises:
            InfraError: the reaper did not finish in time.
        """
        report = self.reaper.finish() if self.reaper is not None else SweepReport([], [])
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        if self.outer and os.environ.get(TAG_VARIABLE) == self.tag:
            exchange_multiprocessing_folder(self.outer[MULTIPROCESSING_FOLDER])
            exchange_environment({name: self.outer[name] for name in self.marks()})
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def exchange_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables of this process (None removes one); return what was there before."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is not None:
            os.environ[name] = value
        elif name in os.environ:
            del os.environ[name]
    return before


def exchange_multiprocessing_folder(folder: str | None) -> str | None:
    """Choose where multiprocessing keeps its sockets (None: a new folder when needed); return the choice before.

    Left alone it makes a folder in the system's temporary folder, which a killed driver leaves behind.
    """
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # no public way
    before: str | None = settings.get(MULTIPROCESSING_FOLDER)
    settings[MULTIPROCESSING_FOLDER] = folder
    return before


def default_parent() -> Path:
    """The folder for temporary folders: /tmp wherever it can be written, because TMPDIR is often long."""
    common = Path("/tmp")
    return common if os.access(common, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def start_reaper(tag: str, temp_dir: Path) -> ReaperHandle:
    """Start the cleaner of a run, in its own session so that Ctrl-C of the terminal's group does not reach it.

    Raises:
        InfraError: it could not be started.
    """
    script = Path(__file__).with_name("reaper.py")
    found = read_process(os.getpid())
    if found is None:
        raise InfraError("cannot read /proc/self/stat; Tandem needs Linux with /proc mounted")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    settings = {
        "tag": tag,
        "temp_dir": str(temp_dir),
        "driver_pid": os.getpid(),
        "driver_started": found[0].started,
        "started_at": time.time() - 1.0,
    }
    if process.stdin is None:
        raise InfraError("the run's cleaner has no standard input")
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    return ReaperHandle(process)


def usable_cores() -> int:
    """Cores that this process may use: its CPU affinity, cut to the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    fields = quota.read_text().split() if quota.is_file() else ["max"]
    if fields[0] == "max":
        return cores
    return max(1, min(cores, int(fields[0]) // int(fields[1])))
