"""`tandem train`: load and check a configuration, then run it, or with --dry-run say whether it could run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer

from rl.cli.console import EXIT_INTERRUPTED, clean_errors, show
from rl.controller.config import MasterConfig
from rl.controller.dry_run import Finding, dry_run
from rl.controller.load import load_config
from rl.controller.options import RunOptions
from rl.core.config_file import ConfigTree, unknown_keys
from rl.core.config_paths import config_name, find_config
from rl.core.errors import ConfigError
from rl.core.imports import import_object

DEFAULT_CONFIG = "grpo_smollm2_cpu"
_RUN = "rl.controller.run:run_training"


class _Report(Protocol):
    """The part of a run's report that the command line tells."""

    interrupted: bool
    note: str


_RunTraining = Callable[[MasterConfig, ConfigTree, RunOptions], _Report]


def train_command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings above the file's, as grpo.max_num_steps=2."),
    ] = None,
    config: Annotated[
        str, typer.Option("--config", "-c", metavar="FILE|NAME", help="A YAML file, or a shipped configuration.")
    ] = DEFAULT_CONFIG,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Go on in the latest unfinished run of the same configuration, start a new one, or go on in PATH.",
        ),
    ] = "auto",
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that needs no hardware, then stop.")
    ] = False,
    allow_unknown_keys: Annotated[
        bool, typer.Option("--allow-unknown-keys", help="Ignore unknown keys, and list them.")
    ] = False,
) -> None:
    """Train a model as a configuration says."""
    with clean_errors():
        path = find_config(config)
        master, tree = load_config(path, overrides or [], allow_unknown_keys)
        for key, source in unknown_keys(tree, master):
            show(f"ignored unknown key {key} ({source})", "yellow", to_stderr=True)
        options = RunOptions(resume=_resume(resume), config_name=config_name(path))
        findings = dry_run(master, options.config_name, options.resume)
        if is_dry_run:
            _show(findings)
        _refuse(findings, "the dry run found problems" if is_dry_run else "the run cannot begin")
        if is_dry_run:
            show(f"ok    {options.config_name} can run")
            return
        run_training = cast(_RunTraining, import_object(_RUN))
        report = run_training(master, tree, options)
        if report.note:
            show(report.note)
        if report.interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)


def _resume(value: str) -> str:
    """Refuse a path that does not exist before anything starts."""
    if value not in ("auto", "never") and (not value or not Path(value).exists()):
        shown = value or repr(value)
        raise ConfigError(f"--resume {shown} is neither auto, never, nor an existing run folder or checkpoint")
    return value


def _show(findings: Sequence[Finding]) -> None:
    """Print what is as it should be."""
    for finding in findings:
        if finding.problem is None:
            show(f"ok    {finding.name}: {finding.note}")


def _refuse(findings: Sequence[Finding], title: str) -> None:
    """Raise what is not as it should be.

    Raises:
        ConfigError: with everything that failed.
    """
    problems = [f"{finding.name}: {finding.problem}" for finding in findings if finding.problem is not None]
    if problems:
        raise ConfigError("\n  ".join([title, *problems]) if len(problems) > 1 else problems[0])
