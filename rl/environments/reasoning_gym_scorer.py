"""Rebuild a reasoning-gym entry from its recipe and score an answer; runs inside scoring processes."""

import functools
import importlib
import json
from typing import Any


def prepare_reasoning_gym() -> None:
    """Import reasoning-gym, so that no deadline pays for it."""
    importlib.import_module("reasoning_gym")


def score_entry(recipe: dict[str, Any], text: str) -> float:
    """Return the task's score of a completion, usually in [0, 1].

    Some tasks raise at an answer of the wrong form. That is the answer's fault, and worth 0, as long as the task can
    score its own reference answer.

    Args:
        recipe: task, size, seed, kwargs and index of the entry.
        text: The completion.

    Raises:
        Exception: whatever the task raises at its own entry.
    """
    utils = importlib.import_module("reasoning_gym.utils")
    settings = {name: value for name, value in recipe.items() if name != "index"}
    task = _task(json.dumps(settings, sort_keys=True))
    entry = task[recipe["index"]]
    answer = utils.extract_answer(text)
    try:
        return float(task.score_answer(text.strip() if answer is None else answer, entry=entry))
    except Exception:  # foreign code on untrusted text; raised again when the task itself is broken
        task.score_answer(entry["answer"], entry=entry)
        return 0.0


@functools.lru_cache(maxsize=8)
def _task(settings: str) -> Any:
    recipe = json.loads(settings)
    gym = importlib.import_module("reasoning_gym")
    return gym.create_dataset(recipe["task"], size=recipe["size"], seed=recipe["seed"], **recipe["kwargs"])
