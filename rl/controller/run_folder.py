"""The folder of a run: allocated atomically, owned by one living process, and found again for a resume.

`<log_dir>/exp_NNN` is made by mkdir, which only one process can win. The owner holds a lock on `run.lock`; the kernel
gives it back when the process dies, however it dies, and child processes do not inherit it. `status.json` says whether
the run is finished, and under which semantic fingerprint it runs.
"""

import enum
import fcntl
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.core.errors import ConfigError
from rl.core.files import replace_atomically

_NAME = re.compile(r"^exp_(\d{3,})$")
_STATUS = "status.json"
_LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
_CHOICES = ("auto", "never")
Say = Callable[[str], None]
Obstacle = Callable[[Path], str | None]


class RunState(enum.Enum):
    """Whether anything is left to do."""

    UNFINISHED = "unfinished"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunStatus:
    """The content of status.json."""

    state: RunState
    fingerprint: str


class RunFolder:
    """A folder that this process owns until `release`, or until it dies.

    Attributes:
        path: The folder.
        is_new: Whether it was made for this run.
        checkpoint: The checkpoint folder that the user asked to go on from; None = the latest.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.is_new = False
        self.checkpoint: Path | None = None
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """Parent of the step_N folders."""
        return self.path / CHECKPOINTS

    def write_status(self, state: RunState, fingerprint: str) -> None:
        """Replace status.json atomically."""
        text = json.dumps({"state": state.value, "fingerprint": fingerprint}) + "\n"
        replace_atomically(self.path / _STATUS, text)

    def release(self) -> None:
        """Give the folder up; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_run_folder(log_dir: Path, resume: str, fingerprint: str, say: Say, obstacle: Obstacle) -> RunFolder:
    """Choose the folder of this run and take it.

    Args:
        log_dir: Parent of exp_NNN; created when missing.
        resume: "auto" goes on in the latest unfinished folder of the same fingerprint, else starts a new one; "never"
            starts a new one; anything else is the path of the run folder to go on in, or of one of its checkpoints.
        fingerprint: Of the semantic configuration.
        say: Tells the user what was chosen and why.
        obstacle: Says why nothing can go on from a folder of checkpoints, or None; "auto" leaves such runs alone.

    Raises:
        ConfigError: the given folder does not exist, is in use, or belongs to another configuration; or the disk
            refuses.
    """
    try:
        return _open(log_dir, resume, fingerprint, say, obstacle)
    except OSError as error:
        raise ConfigError(
            f"cannot use {log_dir if resume in _CHOICES else resume} for runs: {error}; set logger.log_dir to another "
            "place"
        ) from error


def given_run(given: Path, fingerprint: str) -> tuple[Path, Path | None]:
    """Return the run folder that --resume PATH means, and the checkpoint of it if PATH is one. Changes nothing.

    Raises:
        ConfigError: it is no run folder, or belongs to another configuration.
    """
    is_checkpoint = given.parent.name == CHECKPOINTS
    path = given.parent.parent if is_checkpoint else given
    status = read_status(path)
    if status is None:
        raise ConfigError(
            f"--resume {path}: not a run folder (no {_STATUS}); give a folder such as results/my_run/exp_001"
        )
    if status.fingerprint != fingerprint:
        raise ConfigError(
            f"--resume {path}: that run has another semantic configuration; compare its config.yaml with yours, or "
            "start a new run with --resume never"
        )
    return path, given if is_checkpoint else None


def _open(log_dir: Path, resume: str, fingerprint: str, say: Say, obstacle: Obstacle) -> RunFolder:
    if resume not in _CHOICES:
        return _open_given(Path(resume), fingerprint, say)
    log_dir.mkdir(parents=True, exist_ok=True)
    if resume == "auto":
        found = _open_latest_unfinished(log_dir, fingerprint, say, obstacle)
        if found is not None:
            return found
    folder = _allocate(log_dir)
    folder.is_new = True
    folder.write_status(RunState.UNFINISHED, fingerprint)
    return folder


def read_status(path: Path) -> RunStatus | None:
    """The status of the run in `path`, or None when it has none."""
    try:
        values: dict[str, Any] = json.loads((path / _STATUS).read_text(encoding="utf-8"))
        return RunStatus(RunState(values["state"]), str(values["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open_given(given: Path, fingerprint: str, say: Say) -> RunFolder:
    path, checkpoint = given_run(given, fingerprint)
    folder = _take(path)
    if folder is None:
        raise ConfigError(f"--resume {path}: the run is in use by process {_owner(path)}")
    say(f"going on in {path}")
    folder.checkpoint = checkpoint
    return folder


def _open_latest_unfinished(log_dir: Path, fingerprint: str, say: Say, obstacle: Obstacle) -> RunFolder | None:
    finished: Path | None = None
    blocked: Path | None = None
    for _, path in sorted(_numbered(log_dir), reverse=True):
        status = read_status(path)
        if status is None or status.fingerprint != fingerprint:
            continue
        if status.state is RunState.FINISHED:
            finished = finished or path
            continue
        reason = obstacle(path / CHECKPOINTS)
        if reason is not None:
            if blocked is None:
                say(f"not going on in {path}: {reason}")
            blocked = blocked or path
            continue
        folder = _take(path)
        if folder is not None:
            say(f"going on in the unfinished run {path}; to start a new one instead: --resume never")
            return folder
        say(f"{path} has the same semantic configuration but is in use by process {_owner(path)}")
    if finished is not None and blocked is None:
        say(f"{finished} has the same semantic configuration and is finished; starting a new run")
    return None


def _allocate(log_dir: Path) -> RunFolder:
    number = max((number for number, _ in _numbered(log_dir)), default=0) + 1
    while True:
        path = log_dir / f"exp_{number:03d}"
        number += 1
        try:
            path.mkdir()
        except FileExistsError:
            continue
        folder = _take(path)
        if folder is not None:
            return folder


def _take(path: Path) -> RunFolder | None:
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return RunFolder(path, descriptor)


def _owner(path: Path) -> str:
    return (path / _LOCK).read_text(encoding="utf-8") or "unknown"


def _numbered(log_dir: Path) -> list[tuple[int, Path]]:
    matches = [(_NAME.match(path.name), path) for path in log_dir.iterdir() if path.is_dir()]
    return [(int(match.group(1)), path) for match, path in matches if match]
