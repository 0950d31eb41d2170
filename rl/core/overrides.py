"""Overrides from the command line: `key=value`, and the prefixes of Hydra's grammar that mean something here.

    grpo.seed=1          set a key (the schema says whether it exists)
    +env.mine.kind=math  add a key; an error when the files already set it
    ++grpo.seed=1        set a key, whether the files set it or not
    ~grpo.seed           forget what the files say, so that the class default counts

Values are YAML: `[1, 2]`, `{kind: jsonl, path: x}`, `null`, `1e-8`. A mapping merges into the section that it names, as
in a file.
"""

import re
from collections.abc import Sequence

from rl.core.config_tree import COMMAND_LINE, Section, find, merge, nested
from rl.core.errors import ConfigError
from rl.core.yaml_reader import read_yaml

_KEY = re.compile(r"[^\s.=+~]+(\.[^\s.=]+)*")


def apply_overrides(root: Section, overrides: Sequence[str]) -> Section:
    """Return `root` with the overrides applied from left to right.

    Raises:
        ConfigError: an override cannot be read, or adds a key that exists, or removes one that does not.
    """
    for override in overrides:
        root = _apply(root, override)
    return root


def _apply(root: Section, override: str) -> Section:
    if override.startswith("~"):
        return _remove(root, override)
    prefix = re.match(r"\+{0,2}", override)
    operator = prefix.group() if prefix else ""
    key, separator, text = override[len(operator) :].partition("=")
    key = key.strip()
    if not separator:
        raise ConfigError(f"command line: '{override}' is not of the form key=value{_file_hint(override)}")
    path = _path(key, override)
    if not text.strip():
        raise ConfigError(
            f"command line: '{override}' has no value; write {key}=null, or \"{key}=''\" for an empty text"
        )
    if operator == "+" and (there := find(root, path)) is not None:
        raise ConfigError(f"command line: '{override}' adds a key that {there.source} sets already; write {key}={text}")
    return merge(root, nested(path, read_yaml(text, COMMAND_LINE.origin, first_line=None)))


def _remove(root: Section, override: str) -> Section:
    key = override[1:].partition("=")[0].strip()
    path = _path(key, override)
    parent = find(root, path[:-1])
    if not isinstance(parent, Section) or path[-1] not in parent.children:
        raise ConfigError(f"command line: '{override}' removes a key that no file sets")
    remaining = Section(
        parent.source, {name: node for name, node in parent.children.items() if name != path[-1]}, replaces=True
    )
    return remaining if len(path) == 1 else merge(root, nested(path[:-1], remaining))


def _path(key: str, override: str) -> tuple[str, ...]:
    if not _KEY.fullmatch(key):
        raise ConfigError(f"command line: '{key}' in '{override}' is not a dotted key such as grpo.seed")
    return tuple(key.split("."))


def _file_hint(override: str) -> str:
    if override.endswith((".yaml", ".yml")):
        return f"; a configuration file is given with --config {override}"
    return ", for example grpo.max_num_steps=5"
