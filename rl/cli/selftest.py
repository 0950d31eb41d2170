"""`tandem selftest`: run the real parts once on a tiny model, and compare what they compute."""

from collections.abc import Callable
from typing import cast

import typer

from rl.cli.console import clean_errors
from rl.core.imports import import_object

_RUN = "rl.controller.selftest:run_selftest"


def selftest_command() -> None:
    """Try the native op, the trainer, the generator and a refit on a tiny model."""
    with clean_errors():
        run_selftest = cast(Callable[[], int], import_object(_RUN))
        raise typer.Exit(run_selftest())
