"""Build the environments of the `env` section, and check them before anything is started."""

import dis
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from typing import cast

from rl.core.errors import ConfigError
from rl.core.imports import import_object
from rl.environments.base import Environment
from rl.environments.config import EnvConfig, EnvironmentConfig, FunctionEnvConfig, FunctionToolConfig, ToolsEnvConfig
from rl.environments.machine_checks import check_machine
from rl.environments.signatures import needed_columns

# Names of a module that may have any other one too: compiled ones, and those with `import *`, count as if they did.
_UNTOLD = frozenset({"__getattr__"})


def build_environments(env: EnvConfig) -> dict[str, Environment]:
    """Build every named environment; their scoring processes start in the background.

    Raises:
        ConfigError: a reward function cannot be found.
    """
    check_environments(env)
    return {name: build_environment(name, config) for name, config in env.items()}


def build_environment(name: str, config: EnvironmentConfig) -> Environment:
    """Build one environment of that name."""
    build = cast(Callable[[str, EnvironmentConfig], Environment], import_object(config.builder))
    return build(name, config)


def check_environments(env: EnvConfig) -> None:
    """Look for every reward function and tool without running the user's code, and for sandboxes and reward models.

    Raises:
        ConfigError: a module does not exist, its source does not define the name, or this machine lacks what is needed.
    """
    for name, config in env.items():
        for key, target in _targets(config, f"env.{name}"):
            _check_target(target, key)
        check_machine(config, f"env.{name}")


def check_columns(config: EnvironmentConfig, name: str, columns: frozenset[str], dataset: str) -> None:
    """Refuse reward functions of the environment `name` that need columns which the rows lack, where sources tell.

    Args:
        config: Of the environment; `check_environments` has accepted it.
        name: Its name.
        columns: Those that the rows give to functions.
        dataset: How messages call the dataset.

    Raises:
        ConfigError: a function cannot be called with these columns.
    """
    for key, target in _targets(config, f"env.{name}"):
        module, _, function = target.partition(":")
        if isinstance(config, ToolsEnvConfig) and ".tools." in key:
            continue  # its arguments are those of a call
        spec = _find_module(module)
        needed = None if spec is None else needed_columns(spec, function)
        missing = sorted((needed or frozenset()) - columns)
        if missing:
            raise ConfigError(
                f"{key}: {target} needs the column(s) {', '.join(missing)}; {dataset} has "
                f"{', '.join(sorted(columns)) or 'none'} beside prompts and completions"
            )


def _targets(config: EnvironmentConfig, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the user's functions with their dotted keys."""
    match config:
        case FunctionEnvConfig(target=str() as target):
            yield f"{prefix}.target", target
        case FunctionEnvConfig(targets=targets):
            for name, target in targets.items():
                yield f"{prefix}.targets.{name}", target
        case ToolsEnvConfig(tools=tools, scorer=scorer):
            for name, tool in tools.items():
                if isinstance(tool, FunctionToolConfig):
                    yield f"{prefix}.tools.{name}.target", tool.target
            yield from _targets(scorer, f"{prefix}.scorer")


def _check_target(target: str, key: str) -> None:
    module, separator, attribute = target.partition(":")
    if not (module and separator and attribute):
        raise ConfigError(f"{key} '{target}' is not of the form module:function; write for example my_rewards:score")
    names = set(vars(sys.modules[module])) if module in sys.modules else _names_bound(module, target, key)
    if attribute not in names and not names & _UNTOLD:
        found = ", ".join(sorted(name for name in names if not name.startswith("__"))) or "nothing"
        raise ConfigError(f"{key}: module '{module}' defines no '{attribute}'; it defines {found}")


def _names_bound(module: str, target: str, key: str) -> set[str]:
    """Return the names that a module's top level binds, from its compiled code; nothing is imported or run."""
    spec = _find_module(module)
    if spec is None:
        raise ConfigError(
            f"{key}: there is no module '{module}' (of '{target}') on the import path or in {os.getcwd()}; "
            "set PYTHONPATH, or run the command where the module is"
        )
    try:
        code = spec.loader.get_code(spec.name) if isinstance(spec.loader, InspectLoader) else None
    except SyntaxError as error:
        raise ConfigError(f"{spec.origin}:{error.lineno}: {error.msg}") from error
    if code is None or ("*",) in code.co_consts:
        return set(_UNTOLD)
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}


def _find_module(module: str) -> ModuleSpec | None:
    """Look where scoring processes do: the import path, then where the command runs."""
    folders: Sequence[str] | None = [*sys.path, os.getcwd()]
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders) if folders else None
        folders = spec.submodule_search_locations if spec is not None else None
    return spec
