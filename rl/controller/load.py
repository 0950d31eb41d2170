"""From a file and overrides to a configuration that is valid and whose settings go together."""

from collections.abc import Sequence
from pathlib import Path

from rl.controller.checks import check_config
from rl.controller.config import MasterConfig
from rl.core.config_file import ConfigTree, build, load


def load_config(path: Path, overrides: Sequence[str], allow_unknown: bool = False) -> tuple[MasterConfig, ConfigTree]:
    """Load, validate and cross-check.

    Args:
        path: a YAML file.
        overrides: `key=value` strings.
        allow_unknown: ignore unknown keys; `rl.core.config_file.unknown_keys` lists them.

    Raises:
        ConfigError: with everything that is wrong, by file and line.
    """
    tree = load(path, overrides, MasterConfig)
    config = build(tree, MasterConfig, allow_unknown)
    check_config(config, tree)
    return config, tree
