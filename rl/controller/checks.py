"""Checks of the configuration that look at more than one key, before anything starts.

Each check names the keys, their values, and what to write instead; all conflicts are reported at once. A setting that
would have no effect is a conflict too. Checks of single keys are the classes' business; files and models are looked at
by `rl.controller.dry_run`.
"""

from collections.abc import Iterator

from rl.controller.checks_environments import ENVIRONMENT_CHECKS
from rl.controller.checks_eval import EVAL_CHECKS
from rl.controller.checks_loss import LOSS_CHECKS
from rl.controller.checks_policy import POLICY_CHECKS
from rl.controller.checks_rewards import REWARD_CHECKS
from rl.controller.checks_rollout import ROLLOUT_CHECKS
from rl.controller.checks_run import RUN_CHECKS
from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict
from rl.core.config_tree import CLASS_DEFAULT, ConfigTree
from rl.core.errors import ConfigError

ALL_CHECKS: list[Check] = [
    *LOSS_CHECKS,
    *POLICY_CHECKS,
    *REWARD_CHECKS,
    *ROLLOUT_CHECKS,
    *RUN_CHECKS,
    *EVAL_CHECKS,
    *ENVIRONMENT_CHECKS,
]


def find_conflicts(config: MasterConfig) -> Iterator[Conflict]:
    """Yield every conflict in a configuration."""
    for check in ALL_CHECKS:
        yield from check(config)


def check_config(config: MasterConfig, tree: ConfigTree | None = None) -> None:
    """Refuse a configuration whose settings cannot go together.

    Args:
        config: a validated configuration.
        tree: where its values were written, for the message.

    Raises:
        ConfigError: all conflicts, one per line.
    """
    lines = [f"{conflict.problem}; {conflict.fix}{_places(conflict, tree)}" for conflict in find_conflicts(config)]
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        text = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(f"{len(lines)} conflicts in the configuration:\n{text}")


def _places(conflict: Conflict, tree: ConfigTree | None) -> str:
    """Say where the keys of a conflict were written, class defaults left out."""
    if tree is None:
        return ""
    sources = {key: tree.source_of(key) for key in conflict.keys}
    written = [f"{_short(key)} at {source}" for key, source in sources.items() if source != CLASS_DEFAULT]
    return f" ({', '.join(written)})" if written else ""


def _short(key: str) -> str:
    return key.rpartition(".")[2]
