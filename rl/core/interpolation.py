"""Replace `${...}` in a merged configuration.

    ${a.b}  an absolute key            ${.sibling}  a key of the same section       ${..up}  one section higher
    ${mul:${a.b},2}  also add, div and max, of two or more numbers                  \\${  a literal ${

It runs after all files and overrides are merged, so a child's change of a base value reaches what is derived from it.
A key that no file sets has its class default.
"""

import math
from collections.abc import Callable
from typing import Any

from rl.core.config import ConfigModel
from rl.core.config_schema import default_at
from rl.core.config_tree import MISSING, Node, Section, Source, find
from rl.core.errors import ConfigError
from rl.core.yaml_reader import parse_scalar

Number = int | float


def _divide(numbers: list[Number]) -> Number:
    """Divide; two integers that divide exactly give an integer."""
    result, *divisors = numbers
    for divisor in divisors:
        is_exact = isinstance(result, int) and isinstance(divisor, int) and result % divisor == 0
        result = result // divisor if is_exact else result / divisor
    return result


_RESOLVERS: dict[str, Callable[[list[Number]], Number]] = {
    "add": lambda numbers: sum(numbers),
    "mul": lambda numbers: math.prod(numbers),
    "div": _divide,
    "max": lambda numbers: max(numbers),
}
RESOLVER_NAMES = tuple(_RESOLVERS)


def resolve(root: Section, schema: type[ConfigModel] | None) -> dict[str, Any]:
    """Return the plain values below `root` with every interpolation replaced.

    Args:
        root: merged sections.
        schema: class whose defaults stand for keys that are not in `root`; None = such references are errors.

    Raises:
        ConfigError: a reference to nothing, a cycle, or a malformed expression; names the file and line.
    """
    values = _Resolver(root, schema).value(root, ())
    assert isinstance(values, dict)
    return values


class _Resolver:
    """One pass over one tree; `_chain` holds the keys being resolved, which is how a cycle shows."""

    def __init__(self, root: Section, schema: type[ConfigModel] | None) -> None:
        self._root = root
        self._schema = schema
        self._chain: list[tuple[str, ...]] = []

    def value(self, node: Node, path: tuple[str, ...]) -> Any:
        if path in self._chain:
            cycle = " -> ".join(".".join(key) for key in [*self._chain[self._chain.index(path) :], path])
            raise ConfigError(f"{node.source}: interpolation goes round in a circle: {cycle}")
        if isinstance(node, Section):
            return {name: self.value(child, (*path, name)) for name, child in node.children.items()}
        self._chain.append(path)
        value = self._plain(node.value, path, node.source)
        self._chain.pop()
        return value

    def _plain(self, value: Any, path: tuple[str, ...], source: Source) -> Any:
        if isinstance(value, list):
            return [self._plain(item, path, source) for item in value]
        if isinstance(value, dict):
            return {key: self._plain(item, path, source) for key, item in value.items()}
        if isinstance(value, str) and "${" in value:
            return self._expand(value, path, source)
        return value

    def _expand(self, text: str, path: tuple[str, ...], source: Source) -> Any:
        """Expand the expressions in `text`; one that is the whole text keeps its type."""
        pieces: list[Any] = []
        at = 0
        while (start := text.find("${", at)) >= 0:
            if start > at and text[start - 1] == "\\":
                pieces.append(text[at : start - 1] + "${")
                at = start + 2
                continue
            end = _closing_brace(text, start + 2, source)
            if start > at:
                pieces.append(text[at:start])
            pieces.append(self._evaluate(text[start + 2 : end], path, source))
            at = end + 1
        if at < len(text):
            pieces.append(text[at:])
        if len(pieces) == 1:
            return pieces[0]
        for piece in pieces:
            if isinstance(piece, dict | list) or piece == MISSING:
                raise ConfigError(f"{source}: '{text}' puts {piece!r} into a text; refer to a single value that is set")
        return "".join(_as_text(piece) for piece in pieces)

    def _evaluate(self, expression: str, path: tuple[str, ...], source: Source) -> Any:
        name, colon, arguments = expression.partition(":")
        if colon:
            return self._call(name.strip(), arguments, path, source)
        key = str(self._expand(expression, path, source)) if "${" in expression else expression
        return self._look_up(key.strip(), path, source)

    def _call(self, name: str, arguments: str, path: tuple[str, ...], source: Source) -> Any:
        if name not in _RESOLVERS:
            raise ConfigError(f"{source}: '{name}' in ${{{name}:...}} is none of {', '.join(sorted(_RESOLVERS))}")
        numbers: list[Number] = []
        for argument in _split_arguments(arguments):
            value = self._expand(argument, path, source) if "${" in argument else argument
            value = parse_scalar(value.strip()) if isinstance(value, str) else value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{source}: ${{{name}:{arguments}}} needs numbers, '{argument.strip()}' is {value!r}")
            numbers.append(value)
        if len(numbers) < 2:
            raise ConfigError(f"{source}: ${{{name}:{arguments}}} needs at least two numbers")
        try:
            return _RESOLVERS[name](numbers)
        except ZeroDivisionError as error:
            raise ConfigError(f"{source}: ${{{name}:{arguments}}} divides by zero") from error

    def _look_up(self, key: str, path: tuple[str, ...], source: Source) -> Any:
        dots = len(key) - len(key.lstrip("."))
        if dots > len(path):
            raise ConfigError(f"{source}: ${{{key}}} goes above the top of the configuration")
        base = path[: len(path) - dots] if dots else ()
        target = (*base, *key[dots:].split("."))
        node = find(self._root, target)
        if node is not None:
            return self.value(node, target)
        found, value = default_at(self._schema, target, {}) if self._schema is not None else (False, None)
        if not found:
            raise ConfigError(f"{source}: ${{{key}}} refers to {'.'.join(target)}, which does not exist")
        return value


def _closing_brace(text: str, start: int, source: Source) -> int:
    """Return the index of the brace that closes the expression whose inside begins at `start`."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ConfigError(f"{source}: '{text}' lacks a closing brace")


def _split_arguments(text: str) -> list[str]:
    """Split at commas outside braces."""
    arguments, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += character
    return arguments


def _as_text(value: Any) -> str:
    """Write a value into a text as YAML would."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
