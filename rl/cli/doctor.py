"""`tandem doctor`: look at this machine and say what works, what does not, and what to do."""

from collections.abc import Callable
from typing import cast

import typer

from rl.cli.console import clean_errors
from rl.core.imports import import_object

_RUN = "rl.controller.doctor:run_doctor"


def doctor_command() -> None:
    """Check this machine: packages, native code, memory, shared memory, ports, disk."""
    with clean_errors():
        run_doctor = cast(Callable[[], int], import_object(_RUN))
        raise typer.Exit(run_doctor())
