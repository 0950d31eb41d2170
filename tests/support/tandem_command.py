"""Run the `tandem` command as a user does: in a process of its own, in a folder of the test."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import rl

ROOT = Path(rl.__file__).parent.parent


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, how it ended, and how long it took."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


def run_python(arguments: list[str], folder: Path, **environment: str) -> CommandResult:
    """Run Python with `arguments` in `folder`, which is not on the import path: as for an installed command."""
    paths = [str(ROOT), *(str(Path(path).absolute()) for path in sys.path if path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **environment}
    variables.pop("BUILD_WORKING_DIRECTORY", None) if "BUILD_WORKING_DIRECTORY" not in environment else None
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def quickest_tandem(arguments: list[str], folder: Path, limit_s: float) -> CommandResult:
    """Run `tandem` until it stays below the limit, at most three times: other work on the machine may slow it down."""
    for _ in range(3):
        result = run_tandem(arguments, folder)
        if result.seconds < limit_s:
            break
    return result


def run_tandem(arguments: list[str], folder: Path, **environment: str) -> CommandResult:
    """Run `tandem` with `arguments` in `folder`."""
    return run_python(["-m", "rl", *arguments], folder, **environment)
