"""Check that every default of the configuration stands in one place: the class in a config.py.

It fails on
- a class of configuration fields outside a config.py (or *_config.py);
- `.get("key", default)` for a key of the configuration outside a config.py;
- a parameter or field outside a config.py that is named like a configuration key and repeats its default;
- a value in a shipped YAML that equals what would stand there without it.

    python3 tools/check_defaults.py          # exit code 1 and one line per violation
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.controller.config import MasterConfig
from rl.core.config_file import read_with_parents
from rl.core.config_schema import alternatives_at, default_at, discriminator, leaf_fields, sections
from rl.core.config_tree import Leaf, Section, find, merge, plain_values

# Words that many things are called by; a parameter of such a name says nothing about the configuration.
COMMON_NAMES = {
    *(
        "address",
        "enabled",
        "kind",
        "mode",
        "name",
        "part",
        "path",
        "project",
        "seed",
        "shuffle",
        "size",
        "split",
        "target",
    ),
}
CONFIG_BASE = "ConfigModel"


def config_defaults() -> dict[str, list[Any]]:
    """Return the class defaults of every configuration key, by its last part."""
    found: dict[str, list[Any]] = {}
    for section in sections(MasterConfig):
        for name, info in leaf_fields(section.cls):
            defaults = found.setdefault(name, [])
            if not info.is_required():
                defaults.append(info.get_default(call_default_factory=True))
    return found


def _is_config_file(path: Path) -> bool:
    return path.name == "config.py" or path.name.endswith("_config.py")


def _names(nodes: list[ast.expr]) -> list[str]:
    return [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    ]


def _config_classes(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of all classes that derive from ConfigModel, through any number of steps."""
    bases = {
        node.name: _names(node.bases)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {CONFIG_BASE}
    while new := {name for name, parents in bases.items() if name not in found and found & set(parents)}:
        found |= new
    return found - {CONFIG_BASE}


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function that have defaults, with those."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = node.args.defaults
    for argument, default in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        yield argument.arg, default
    for argument, keyword_default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if keyword_default is not None:
            yield argument.arg, keyword_default


def _repeats(name: str, value: ast.expr, defaults: dict[str, list[Any]]) -> bool:
    """Say whether a literal repeats the default of the key of that name.

    Null is too common to tell. A boolean that is named like a key is a second default of it even where the two differ.
    """
    if name in COMMON_NAMES or not isinstance(value, ast.Constant) or value.value is None:
        return False
    if isinstance(value.value, bool):
        return any(isinstance(default, bool) for default in defaults.get(name, []))
    return any(type(default) is type(value.value) and default == value.value for default in defaults.get(name, []))


def _get_violation(call: ast.Call, receiver: ast.expr, defaults: dict[str, list[Any]]) -> str | None:
    """Word a `.get` with a default on something called config, or one that repeats a key's default."""
    if len(call.args) != 2 or not isinstance(call.args[0], ast.Constant) or call.args[0].value not in defaults:
        return None
    key = str(call.args[0].value)
    if key in COMMON_NAMES:
        return None
    is_config = re.search(r"config|cfg|settings|section", ast.unparse(receiver), re.IGNORECASE) is not None
    if not is_config and not _repeats(key, call.args[1], defaults):
        return None
    return f'.get("{key}", ...) gives a configuration key a second default; read the config class'


def _code_violations(tree: ast.Module, classes: set[str], defaults: dict[str, list[Any]]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if node.name in classes:
                yield node.lineno, f"{node.name} declares configuration; move it to a config.py"
            for field in node.body:
                is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value
                if is_field and _repeats(field.target.id, field.value, defaults):
                    yield (
                        field.lineno,
                        f"field {field.target.id} repeats the default of a configuration key; leave it out",
                    )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name, value in _parameters(node):
                if _repeats(name, value, defaults):
                    yield (
                        node.lineno,
                        f"parameter {name} of {node.name} repeats the default of a configuration key; leave it out",
                    )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            violation = _get_violation(node, node.func.value, defaults)
            if violation is not None:
                yield node.lineno, violation


def find_scattered_defaults(root: Path) -> Iterator[str]:
    """Yield one line per default outside a config.py under rl/."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((root / "rl").rglob("*.py"))}
    classes, defaults = _config_classes(trees), config_defaults()
    for path, tree in trees.items():
        if not _is_config_file(path):
            for line, violation in _code_violations(tree, classes, defaults):
                yield f"{path.relative_to(root).as_posix()}:{line}: {violation}"


def _leaves(section: Section, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    for name, node in section.children.items():
        if isinstance(node, Section):
            yield from _leaves(node, (*path, name))
        else:
            yield (*path, name), node


def find_redundant_values(file: Path) -> Iterator[str]:
    """Yield one line per value in a YAML file that its parents or the classes give already."""
    parents, own = read_with_parents(file)
    values = plain_values(merge(parents, own))
    for path, leaf in _leaves(own):
        below = find(parents, path)
        # What chooses among classes has no default of the class that it chose, and `kind` is read from the file alone.
        is_choice = path[-1] == discriminator(alternatives_at(MasterConfig, path[:-1], values))
        is_set, default = default_at(MasterConfig, path, {} if is_choice else values)
        if isinstance(below, Leaf):
            if below.value == leaf.value:
                yield f"{leaf.source}: {'.'.join(path)} is {leaf.value!r} already, by {below.source}; leave it out"
        elif is_set and path[-1] != "kind" and (list(default) if isinstance(default, tuple) else default) == leaf.value:
            yield f"{leaf.source}: {'.'.join(path)} is {leaf.value!r} already, by its class; leave it out"


def main() -> int:
    """Print the violations of the tree that this file stands in."""
    root = Path(__file__).resolve().parent.parent
    files = sorted((root / "configs").glob("*.yaml"))
    violations = [*find_scattered_defaults(root), *(line for file in files for line in find_redundant_values(file))]
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
