"""`tandem selftest`: run small real parts once, and compare what they compute."""

from collections.abc import Callable, Sequence
from typing import cast

import typer

from rl.cli.checks_view import show_checks
from rl.cli.console import clean_errors
from rl.controller.checklist import Check
from rl.core.imports import import_object

_RUN = "rl.controller.selftest:run_selftest"


def selftest_command() -> None:
    """Compute a little with the native op, workers, shared memory and the clean-up, and compare."""
    with clean_errors():
        run_selftest = cast(Callable[[], Sequence[Check]], import_object(_RUN))
        raise typer.Exit(show_checks(run_selftest()))
