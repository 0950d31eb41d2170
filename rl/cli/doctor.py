"""`tandem doctor`: look at this machine and say what works, what does not, and what to do."""

from collections.abc import Callable, Sequence
from typing import cast

import typer

from rl.cli.checks_view import show_checks
from rl.cli.console import clean_errors
from rl.controller.checklist import Check
from rl.core.imports import import_object

_RUN = "rl.controller.doctor:run_doctor"


def doctor_command() -> None:
    """Check this machine: packages, native code, memory, shared memory, ports, disk."""
    with clean_errors():
        run_doctor = cast(Callable[[], Sequence[Check]], import_object(_RUN))
        raise typer.Exit(show_checks(run_doctor()))
