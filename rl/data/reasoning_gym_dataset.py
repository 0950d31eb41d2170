"""Rows of a reasoning-gym task; the only module of `data` that imports `reasoning_gym`.

A row carries the recipe of its entry (task, seed, index), from which the environment rebuilds it for scoring.
"""

from collections.abc import Sequence
from typing import Any

import reasoning_gym

from rl.core.errors import ConfigError
from rl.core.types import Message
from rl.data.columns import ANSWER, PLAIN_TEXT, Row, json_value
from rl.data.config import ReasoningGymDataset

RECIPE = "reasoning_gym"
# The tasks seed entry i with seed + i, so neighbouring seeds would give nearly the same rows, and validation would be
# trained on. So seeds are spread: those up to 2000 share no entry in datasets of up to a million rows.
_SEED_STRIDE, _SEED_RANGE = 1_000_003, 2**31 - 1


def load_reasoning_gym_rows(config: ReasoningGymDataset) -> Sequence[Row]:
    """Make the rows of the task.

    Raises:
        ConfigError: no such task, or settings that it does not take.
    """
    entries = _create(config)
    return [_row(config, index, entries[index]) for index in range(config.size)]


def check_task(config: ReasoningGymDataset) -> None:
    """Raise a ConfigError when the task does not exist or refuses its settings."""
    _create(config)


def _create(config: ReasoningGymDataset) -> Any:
    try:
        return reasoning_gym.create_dataset(config.task, size=config.size, seed=_task_seed(config), **config.kwargs)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym cannot make the task '{config.task}' with {config.kwargs}: {error}"
        ) from error


def _row(config: ReasoningGymDataset, index: int, entry: dict[str, Any]) -> Row:
    recipe = {
        "task": config.task,
        "size": config.size,
        "seed": _task_seed(config),
        "kwargs": config.kwargs,
        "index": index,
    }
    return Row(
        row_id=f"{config.task}:{config.seed}:{index}",
        messages=(Message(PLAIN_TEXT, entry["question"]),),
        metadata={ANSWER: json_value(entry["answer"]), RECIPE: recipe},
    )


def _task_seed(config: ReasoningGymDataset) -> int:
    return config.seed * _SEED_STRIDE % _SEED_RANGE
