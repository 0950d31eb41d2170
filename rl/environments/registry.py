"""Build the environments of the `env` section, and check them before anything is started."""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from rl.core.errors import ConfigError
from rl.core.imports import import_object
from rl.environments.base import Environment
from rl.environments.config import EnvConfig, EnvironmentConfig, FunctionEnvConfig


def build_environments(env: EnvConfig) -> dict[str, Environment]:
    """Build every named environment; their scoring processes start in the background.

    Raises:
        ConfigError: a reward function cannot be found.
    """
    check_environments(env)
    return {name: _build(name, config) for name, config in env.items()}


def check_environments(env: EnvConfig) -> None:
    """Look for every reward function without running the user's code.

    Raises:
        ConfigError: a module does not exist, or its source does not define the name.
    """
    for name, config in env.items():
        if isinstance(config, FunctionEnvConfig):
            _check_target(config.target, f"env.{name}.target")


def _build(name: str, config: EnvironmentConfig) -> Environment:
    build = cast(Callable[[str, EnvironmentConfig], Environment], import_object(config.builder))
    return build(name, config)


def _check_target(target: str, key: str) -> None:
    module, separator, attribute = target.partition(":")
    if not (module and separator and attribute):
        raise ConfigError(f"{key} '{target}' is not of the form module:function; write for example my_rewards:score")
    source = _source_of(module, target, key)
    names = None if source is None else _names_defined(source)
    if names is not None and attribute not in names:
        raise ConfigError(
            f"{key}: '{source}' defines no '{attribute}'; it defines {', '.join(sorted(names)) or 'nothing'}"
        )


def _source_of(module: str, target: str, key: str) -> Path | None:
    """Find the file of a module where scoring processes will: on the import path, then where the command runs."""
    local = Path(os.getcwd(), *module.split("."))
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is not None:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    for candidate in (local.with_suffix(".py"), local / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"{key}: there is no module '{module}' (of '{target}') on the import path or in {os.getcwd()}; "
        "set PYTHONPATH, or run the command where the module is"
    )


def _names_defined(source: Path) -> set[str] | None:
    """Return the names that a module's top level binds; None when its source does not tell (import *, __getattr__)."""
    try:
        tree = ast.parse(source.read_text())
    except SyntaxError as error:
        raise ConfigError(f"{source}:{error.lineno}: {error.msg}") from error
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name="*"):
                return None
            case ast.alias(name=name, asname=alias):
                names.add(alias or name.partition(".")[0])
    return None if "__getattr__" in names else names
