"""Cross-section checks of environments against turns and datasets. See `rl.controller.checks`."""

from collections.abc import Iterator

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert
from rl.controller.scored_datasets import scored_datasets
from rl.data.config import HfDataset, JsonlDataset, SlidingPuzzleDataset
from rl.environments.config import (
    EnvironmentConfig,
    FunctionEnvConfig,
    SlidingPuzzleEnvConfig,
    ToolsEnvConfig,
)

_TURNS = "grpo.max_rollout_turns"


def turns_fit_the_environment(config: MasterConfig) -> Iterator[Conflict]:
    """A task of several turns needs them, and any other task has no use for them."""
    env, key = config.env.get(config.data.env_name), f"env.{config.data.env_name}.kind"
    if env is None:
        return
    if env.is_multi_turn and config.grpo.max_rollout_turns == 1:
        problem = f"{_TURNS}=1 ends every rollout before the environment can answer it ({key}={env.kind})"
        yield Conflict((_TURNS, key), problem, f"set {_TURNS}=3, say")
    if not env.is_multi_turn:
        yield from inert(config.grpo, "grpo", ["max_rollout_turns"], key, f"{key}={env.kind} takes one turn")


def moves_fit_the_turns(config: MasterConfig) -> Iterator[Conflict]:
    """More moves than turns are never made."""
    env, prefix = config.env.get(config.data.env_name), f"env.{config.data.env_name}"
    if isinstance(env, SlidingPuzzleEnvConfig) and env.max_moves > config.grpo.max_rollout_turns > 1:
        reason = f"{_TURNS}={config.grpo.max_rollout_turns} ends a rollout before"
        yield from inert(env, prefix, ["max_moves"], _TURNS, reason)


def puzzles_are_played(config: MasterConfig) -> Iterator[Conflict]:
    """The sliding puzzle's boards and environment go together; a function of the user's may score anything."""
    for each in scored_datasets(config):
        section, dataset, key, env = each.key, each.dataset, f"{each.env_key}.kind", each.env
        is_board, plays = isinstance(dataset, SlidingPuzzleDataset), isinstance(env, SlidingPuzzleEnvConfig)
        if is_board != plays and not isinstance(env, FunctionEnvConfig):
            problem = f"{section}.kind={dataset.kind} with {key}={env.kind}: only sliding_puzzle plays sliding_puzzle"
            fix = f"set {key}=sliding_puzzle" if is_board else f"set {section}.kind=sliding_puzzle"
            yield Conflict((f"{section}.kind", key), problem, fix)


def answers_are_there(config: MasterConfig) -> Iterator[Conflict]:
    """Whoever compares with a reference answer needs its column."""
    for each in scored_datasets(config):
        section, dataset = each.key, each.dataset
        scorer, env_key = _scorer(each.env, each.env_key)
        if scorer.needs_answer and isinstance(dataset, JsonlDataset | HfDataset) and dataset.answer_key is None:
            key = f"{section}.answer_key"
            problem = f"{key}=null with {env_key}={scorer.kind}: there is no answer to compare with"
            yield Conflict((key, env_key), problem, f"set {key}")


def _scorer(env: EnvironmentConfig, prefix: str) -> tuple[EnvironmentConfig, str]:
    """Return what scores an answer, and the key of its kind."""
    return (env.scorer, f"{prefix}.scorer.kind") if isinstance(env, ToolsEnvConfig) else (env, f"{prefix}.kind")


ENVIRONMENT_CHECKS: list[Check] = [
    turns_fit_the_environment,
    moves_fit_the_turns,
    puzzles_are_played,
    answers_are_there,
]
