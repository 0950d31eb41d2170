"""The `tandem` command. It imports nothing heavy: a command that trains reaches torch and Ray by import path only."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import rl
from rl.cli.config import config_command
from rl.cli.doctor import doctor_command
from rl.cli.eval import eval_command
from rl.cli.selftest import selftest_command
from rl.cli.train import train_command

app = typer.Typer(
    name="tandem",
    help="Reinforcement learning of language models: trainer and generator pedal together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train_command)
app.command("eval")(eval_command)
app.command("config")(config_command)
app.command("doctor")(doctor_command)
app.command("selftest")(selftest_command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tandem {rl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. The process's entry point is `rl.__main__`.

    Args:
        arguments: without the program's name; None = those of the process.
    """
    _enter_the_users_folder()
    app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="tandem")


def _enter_the_users_folder() -> None:
    """Under `bazel run`, go to where the user stands, so that relative paths mean what they say."""
    folder = os.environ.get("BUILD_WORKING_DIRECTORY")
    if folder:
        os.chdir(folder)
