"""How the commands speak: results on stdout, errors as one clean block on stderr, exit codes.

0 done, 1 failure, 2 bad usage or configuration, 130 interrupted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from rl.cli.process import EXIT_INTERRUPTED
from rl.core.errors import ConfigError, RLError

__all__ = ["EXIT_FAILURE", "EXIT_INTERRUPTED", "EXIT_USAGE", "clean_errors", "show", "show_error"]

EXIT_FAILURE = 1
EXIT_USAGE = 2


def show(text: str, style: str = "", to_stderr: bool = False) -> None:
    """Print text as it is: no markup, no wrapping, and no colour when piped."""
    Console(stderr=to_stderr, highlight=False, soft_wrap=True).print(Text(text, style=style))


def show_error(title: str, message: str) -> None:
    """Print one error block on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{title}: ", "bold red"), message))


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turn Tandem's own errors and Ctrl-C into one block and an exit code; anything else keeps its traceback.

    The traceback of an error that ended a run stands in its run.log.
    """
    try:
        yield
    except ConfigError as error:
        show_error("configuration error", str(error))
        raise typer.Exit(EXIT_USAGE) from error
    except RLError as error:
        show_error(f"failed ({type(error).__name__})", str(error))
        raise typer.Exit(EXIT_FAILURE) from error
    except KeyboardInterrupt as error:
        show("interrupted", to_stderr=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error
