"""Environments that do not fit the turns or the prompts are refused."""

from pathlib import Path

import pytest

from rl.controller.checks import ALL_CHECKS, find_conflicts
from rl.controller.checks_environments import ENVIRONMENT_CHECKS
from rl.controller.config import MasterConfig
from rl.core.config_file import build, load
from rl.core.config_paths import find_config

DEFAULT, TOOLS = find_config("grpo_smollm2_cpu"), find_config("tool_smollm2_cpu")
JSONL = "data.train={_override_: true, kind: jsonl, path: x, answer_key: null}"
PUZZLE_DATA = [
    "data.train={_override_: true, kind: sliding_puzzle}",
    "data.validation={_override_: true, kind: sliding_puzzle, seed: 1}",
]
PUZZLE = [*PUZZLE_DATA, "+env.puzzle={_override_: true, kind: sliding_puzzle}", "data.env_name=puzzle"]
MULTI = ["+env.parts={kind: math_multi_reward}", "data.env_name=parts"]

# The check, the file, the overrides that make it speak, and a piece of the message.
CONFLICTS = [
    ("turns_fit_the_environment", TOOLS, ["grpo.max_rollout_turns=1"], "before the environment can answer it"),
    ("turns_fit_the_environment", DEFAULT, PUZZLE, "env.puzzle.kind=sliding_puzzle"),
    ("turns_fit_the_environment", DEFAULT, ["grpo.max_rollout_turns=2"], "env.math.kind=math takes one turn"),
    (
        "moves_fit_the_turns",
        DEFAULT,
        [*PUZZLE, "grpo.max_rollout_turns=4", "+env.puzzle.max_moves=9"],
        "grpo.max_rollout_turns=4 ends a rollout before",
    ),
    ("puzzles_are_played", DEFAULT, PUZZLE_DATA[:1], "only sliding_puzzle plays sliding_puzzle"),
    (
        "puzzles_are_played",
        DEFAULT,
        [*PUZZLE[2:], "grpo.max_rollout_turns=4", "data.validation=null", "grpo.val_at_start=false"],
        "data.train.kind=few_shot_addition with env.puzzle.kind=sliding_puzzle",
    ),
    ("answers_are_there", DEFAULT, [JSONL], "data.train.answer_key=null with env.math.kind=math"),
    ("answers_are_there", DEFAULT, [JSONL, *MULTI], "env.parts.kind=math_multi_reward"),
    ("answers_are_there", TOOLS, [JSONL], "env.calculator.scorer.kind=math"),
]
ACCEPTED = [
    (DEFAULT, [*PUZZLE, "grpo.max_rollout_turns=4"]),
    (DEFAULT, MULTI),
    (TOOLS, []),
    (TOOLS, [JSONL, "env.calculator.scorer={_override_: true, kind: function, target: 'm:f'}"]),
]


def read(file: Path, overrides: list[str]) -> MasterConfig:
    return build(load(file, overrides, MasterConfig), MasterConfig, allow_unknown=False)


def conflicts(file: Path, overrides: list[str]) -> list[tuple[str, str]]:
    config = read(file, overrides)
    return [(check.__name__, conflict.problem) for check in ENVIRONMENT_CHECKS for conflict in check(config)]


@pytest.mark.parametrize(("check", "file", "overrides", "message"), CONFLICTS)
def test_a_conflict_is_found_by_its_check(check: str, file: Path, overrides: list[str], message: str) -> None:
    found = conflicts(file, overrides)
    assert found and {name for name, _ in found} == {check}
    assert any(message in problem for _, problem in found)


def test_every_check_has_a_conflict_above_and_is_used() -> None:
    assert {check for check, *_ in CONFLICTS} == {check.__name__ for check in ENVIRONMENT_CHECKS}
    assert set(ENVIRONMENT_CHECKS) <= set(ALL_CHECKS)


@pytest.mark.parametrize(("file", "overrides"), ACCEPTED)
def test_what_goes_together_is_accepted(file: Path, overrides: list[str]) -> None:
    assert list(find_conflicts(read(file, overrides))) == []
