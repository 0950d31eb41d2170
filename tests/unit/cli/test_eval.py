"""`tandem eval` refuses bad input quickly, and shows its results as a table."""

import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rl.cli.eval import results_table
from rl.controller.eval_results import TaskResult
from tests.support.tandem_command import run_tandem

COUNTS = {"prompts": 2, "asked": 8, "scored": 7, "failed": 1, "truncated": 0, "dropped_prompts": 0, "faulty_prompts": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.bad=1"], "command line: unknown key eval.bad"),
        (["eval.num_generations=4"], "eval.num_generations=4 with eval.temperature=0 repeats one greedy sample"),
        (["eval.k=[3]"], "needs eval.num_generations >= 3, got 1"),
        (
            ["--checkpoint", "nowhere"],
            "--checkpoint nowhere is no run folder, no checkpoint of one and no Hugging Face",
        ),
        (["policy.model_name=./nowhere"], "policy.model_name=./nowhere"),
        (["--output", "."], "--output . exists"),
    ],
)
def test_bad_input_is_exit_code_2_and_leaves_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run_tandem(["eval", *arguments], tmp_path)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == []


TASKS = [
    TaskResult("sums", COUNTS | {"skipped_prompts": 0}, {"avg@4": 0.25, "pass@1": 0.25, "env/accuracy": 1.0}),
    TaskResult("all", COUNTS | {"skipped_prompts": 3}, {"avg@4": 0.5}),
]
NAMES = ["task", "prompts", "asked", "scored", "failed", "truncated", "skipped prompts", "avg@4", "pass@1"]


def table_of(tasks: list[TaskResult]) -> list[list[str]]:
    out = StringIO()
    Console(file=out, width=160).print(results_table(tasks))
    head, _, *rows = out.getvalue().splitlines()
    return [[cell.strip() for cell in row.replace("┃", "│").split("│")] for row in (head, *rows)]


def test_few_tasks_stand_side_by_side_with_rare_counts_where_there_are_any() -> None:
    table = table_of(TASKS)
    assert [row[0] for row in table] == NAMES
    assert [row[1] for row in table] == ["sums", "2", "8", "7", "1", "0", "0", "0.2500", "0.2500"]
    assert [row[2] for row in table][-3:] == ["3", "0.5000", ""]


def test_many_tasks_stand_one_below_the_other() -> None:
    table = table_of([*TASKS[:1] * 4, TASKS[1]])
    assert table[0] == NAMES
    assert [row[0] for row in table[1:]] == ["sums"] * 4 + ["all"]
