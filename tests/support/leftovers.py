"""What a run has on the host: processes, by the tag in their environment, shared memory, a temporary folder."""

from pathlib import Path

import psutil

from rl.core.reaper import TAG_VARIABLE
from tests.support.waiting import wait_for_exit

GONE_WITHIN_S = 10.0


def children_of(process_id: int) -> list[psutil.Process]:
    """Every process that a run has started, directly or not."""
    return psutil.Process(process_id).children(recursive=True)


def tag_of(process_id: int) -> str:
    """The run's tag, out of the environment of its children."""
    tags = {tag for child in children_of(process_id) if (tag := _tag(child))}
    assert len(tags) == 1, tags
    return tags.pop()


def processes_of(tag: str) -> list[psutil.Process]:
    """The living processes of the run."""
    return [process for process in psutil.process_iter() if _tag(process) == tag]


def files_of(tag: str) -> list[Path]:
    """Its shared memory and temporary folders."""
    return [path for folder in (Path("/dev/shm"), Path("/tmp")) for path in folder.glob(f"*{tag}*")]


def assert_nothing_left(tag: str, children: list[psutil.Process]) -> None:
    """No process, shared memory or temporary folder of the run is left soon after its end."""
    # The reaper, which removes the rest, is among them.
    wait_for_exit([child.pid for child in children], GONE_WITHIN_S)
    assert processes_of(tag) == []
    assert files_of(tag) == []


def _tag(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(TAG_VARIABLE)
    except psutil.Error:  # it has just ended, or belongs to somebody else
        return None
