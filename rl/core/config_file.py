"""Load a configuration: YAML files with inheritance, command-line overrides, interpolation; then validate it.

    tree = load(Path("configs/grpo_math.yaml"), ["grpo.seed=1"], MasterConfig)
    config = build(tree, MasterConfig, allow_unknown=False)

`defaults:` at the top of a file names its parent or a list of parents, relative to that file. Parents are read
depth-first, a later parent overrides an earlier one, and the file overrides them all. Sections merge, all else is
replaced; a section with `_override_: true` replaces the inherited one. Nothing here knows a particular key.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from rl.core.config import ConfigModel
from rl.core.config_errors import describe, describe_unset, key_path, unset_mandatory
from rl.core.config_paths import current_folder, is_shipped, shipped_config
from rl.core.config_tree import (
    CLASS_DEFAULT,
    COMMAND_LINE,
    ConfigTree,
    Leaf,
    Section,
    Source,
    iterate_sources,
    merge,
)
from rl.core.errors import ConfigError
from rl.core.interpolation import resolve
from rl.core.overrides import apply_overrides
from rl.core.yaml_reader import read_yaml

__all__ = [
    "CLASS_DEFAULT",
    "COMMAND_LINE",
    "ConfigTree",
    "Source",
    "build",
    "display_path",
    "load",
    "read_with_parents",
    "unknown_keys",
]

_DEFAULTS = "defaults"
M = TypeVar("M", bound=ConfigModel)


def load(path: Path, overrides: Sequence[str], schema: type[ConfigModel] | None = None) -> ConfigTree:
    """Read a file with its parents, apply overrides, and resolve interpolations.

    Args:
        path: a YAML file.
        overrides: `key=value` strings, see `rl.core.overrides`.
        schema: class whose defaults interpolations may refer to.

    Raises:
        ConfigError: something cannot be read or resolved; the message names file and line.
    """
    root = apply_overrides(merge(*read_with_parents(path)), overrides)
    return ConfigTree(resolve(root, schema), dict(iterate_sources(root)), path)


def build(tree: ConfigTree, model: type[M], allow_unknown: bool) -> M:
    """Validate a tree and return the configuration.

    Types are strict: the text "8" is no number and 1 is no boolean.

    Args:
        tree: what `load` returned.
        model: the class of the whole configuration.
        allow_unknown: leave unknown keys out instead of failing; `unknown_keys` lists them.

    Raises:
        ConfigError: all errors at once, each with file, line, and what to write instead.
    """
    values = json.loads(json.dumps(tree.values))
    unset = list(unset_mandatory(values))
    while True:
        try:
            # JSON is where strict validation still takes a list for a tuple.
            config = model.model_validate_json(json.dumps(values), strict=True)
            break
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
        unknown = [error for error in errors if error["type"] == "extra_forbidden"]
        if not (allow_unknown and unknown):
            errors = [error for error in errors if key_path(error["loc"], tree.values, model) not in unset]
            _fail([*(describe_unset(path, tree, model) for path in unset), *describe(errors, tree, model)])
        for error in unknown:
            _delete(values, key_path(error["loc"], values, model))
    if unset:
        _fail([describe_unset(path, tree, model) for path in unset])
    return config


def read_with_parents(path: Path) -> tuple[Section, Section]:
    """Return what a file inherits from its parents, merged, and what it says itself."""
    return _read(path, [])


def unknown_keys(tree: ConfigTree, config: BaseModel) -> list[tuple[str, Source]]:
    """Return the keys of `tree` that `config` has no place for, with their sources."""
    return [(key, tree.source_of(key)) for key in _unknown(tree.values, config, "")]


def display_path(path: Path) -> str:
    """Return a path as the user would type it: relative when it lies below the current folder.

    A shipped configuration elsewhere, under Bazel far away from where anybody looks, is "shipped base.yaml".
    """
    folder = current_folder()
    absolute = folder / path
    if absolute.is_relative_to(folder):
        return str(absolute.relative_to(folder))
    return f"shipped {path.name}" if is_shipped(absolute) else str(path)


def _read(path: Path, chain: list[Path]) -> tuple[Section, Section]:
    """Return what a file inherits and what it says itself; `chain` holds the files that led here."""
    identity = path.resolve()
    if identity in chain:
        names = " -> ".join(display_path(each) for each in [*chain[chain.index(identity) :], identity])
        raise ConfigError(f"{display_path(path)}: 'defaults' goes round in a circle: {names}")
    root = read_yaml(_text(path), display_path(path))
    if not isinstance(root, Section):
        raise ConfigError(f"{root.source}: a configuration is a mapping of sections, not {root.value!r}")
    inherited = Section(root.source)
    for name, source in _parents(root):
        parent = _parent(path, name, source)
        inherited = merge(inherited, merge(*_read(parent, [*chain, identity])))
    return inherited, root


def _parent(path: Path, name: str, source: Source) -> Path:
    """Return the file beside `path` that a parent's name means, else the shipped configuration of that name."""
    beside = path.parent / name
    if beside.is_file():
        return beside
    shipped = shipped_config(name)
    if shipped is None:
        looked = display_path(beside)
        raise ConfigError(f"{source}: parent '{name}' does not exist (looked for {looked} and among the shipped ones)")
    return shipped


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {display_path(path)} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {display_path(path)} cannot be read: {error}") from error


def _parents(root: Section) -> list[tuple[str, Source]]:
    """Take `defaults:` out of a file's top level and return the parents that it names."""
    node = root.children.pop(_DEFAULTS, None)
    if node is None:
        return []
    names = node.value if isinstance(node, Leaf) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{node.source}: 'defaults' must be the path of a parent file or a list of paths")
    return [(name, node.source) for name in names]


def _fail(lines: list[str]) -> NoReturn:
    if len(lines) == 1:
        raise ConfigError(lines[0])
    raise ConfigError(f"{len(lines)} errors in the configuration:\n" + "\n".join(f"  {line}" for line in lines))


def _delete(values: dict[str, Any], path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        values = values[part]
    del values[path[-1]]


def _unknown(values: Mapping[str, Any], config: BaseModel | Mapping[str, Any], prefix: str) -> list[str]:
    found = []
    fields = dict(config) if isinstance(config, BaseModel) else config
    for name, value in values.items():
        if name not in fields:
            found.append(f"{prefix}{name}")
        elif isinstance(value, Mapping) and isinstance(fields[name], BaseModel | Mapping):
            found.extend(_unknown(value, fields[name], f"{prefix}{name}."))
    return found
