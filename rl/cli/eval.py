"""`tandem eval`: sample a model on held-out prompts, and say how often it is right."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer
from rich.console import Console
from rich.table import Table

from rl.cli.console import EXIT_INTERRUPTED, clean_errors, show
from rl.cli.train import DEFAULT_CONFIG
from rl.controller.eval_plan import EvalOptions, EvalPlan, plan_evaluation, run_config
from rl.controller.eval_results import TaskResult
from rl.controller.load import load_config
from rl.core.config_file import ConfigTree, unknown_keys
from rl.core.config_paths import config_name, find_config
from rl.core.imports import import_object

_RUN = "rl.controller.evaluation:run_evaluation"
_COUNTS = ("prompts", "asked", "scored", "failed", "truncated")
# Shown in the column of their name only where one is not zero.
_RARE_COUNTS = ("dropped_prompts", "skipped_prompts", "faulty_prompts")
_PLAIN_WIDTH = 200
_SIDE_BY_SIDE = 4


class _Report(Protocol):
    """The part of an evaluation's report that the command line tells."""

    folder: Path
    tasks: Sequence[TaskResult]
    interrupted: bool


_RunEvaluation = Callable[[EvalPlan, ConfigTree], _Report]


def eval_command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings above the file's, as eval.num_generations=4."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE|NAME",
            help=f"A YAML file, or a shipped configuration; that of the run of --checkpoint, else {DEFAULT_CONFIG}.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A run folder (its latest checkpoint), a checkpoint or a model folder to evaluate."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the results go; a new folder beside the run.")
    ] = None,
    allow_unknown_keys: Annotated[
        bool, typer.Option("--allow-unknown-keys", help="Ignore unknown keys, and list them.")
    ] = False,
) -> None:
    """Evaluate a model on held-out prompts: avg@n, pass@k and cons@k by task."""
    with clean_errors():
        own = run_config(checkpoint) if config is None else None
        path = find_config(config or DEFAULT_CONFIG) if own is None else own
        master, tree = load_config(path, overrides or [], allow_unknown_keys)
        for key, source in unknown_keys(tree, master):
            show(f"ignored unknown key {key} ({source})", "yellow", to_stderr=True)
        plan = plan_evaluation(master, EvalOptions(config_name(path), checkpoint, output, own and own.parent))
        run_evaluation = cast(_RunEvaluation, import_object(_RUN))
        report = run_evaluation(plan, tree)
        if report.interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        terminal = Console(highlight=False)
        if not terminal.is_terminal:
            terminal.width = _PLAIN_WIDTH
        terminal.print(results_table(report.tasks))
        show(f"results {report.folder / 'results.json'}")


def results_table(tasks: Sequence[TaskResult]) -> Table:
    """Return a table of all counts and metrics; few tasks stand side by side, many one below the other.

    A metric that a task lacks is left empty. The environments' own numbers stand in results.json alone.
    """
    rare = [name for name in _RARE_COUNTS if any(task.counts[name] for task in tasks)]
    metrics = dict.fromkeys(name for task in tasks for name in task.metrics if not name.startswith("env/"))
    rows = [[name.replace("_", " "), *(str(task.counts[name]) for task in tasks)] for name in [*_COUNTS, *rare]]
    rows += [[name.replace("_", " "), *(_shown(task, name) for task in tasks)] for name in metrics]
    cells = [["task", *(task.name for task in tasks)], *rows]
    if len(tasks) > _SIDE_BY_SIDE:
        cells = [list(column) for column in zip(*cells, strict=True)]
    table = Table(show_edge=False)
    for index, title in enumerate(cells[0]):
        table.add_column(title, justify="right" if index else "left", style="" if index else "bold")
    for row in cells[1:]:
        table.add_row(*row)
    return table


def _shown(task: TaskResult, name: str) -> str:
    return f"{task.metrics[name]:.4f}" if name in task.metrics else ""
