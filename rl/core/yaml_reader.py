"""Read YAML into sections and leaves that remember their lines.

Scalars follow the YAML 1.2 core schema: `1e-8` is a number, `yes`, `on` and `1:30` are strings. A key that occurs twice
is an error, and so are tags and merge keys. This file does not know `defaults:` or interpolation.
"""

import re
from typing import Any

import yaml

from rl.core.config_tree import Leaf, Node, Section, Source
from rl.core.errors import ConfigError

OVERRIDE_MARK = "_override_"

_PATTERNS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}
_TAG = "tag:yaml.org,2002:"
# Far above any configuration; aliases of aliases multiply beyond all bounds.
_MAX_NODES = 100_000


class _Composer(
    yaml.composer.Composer, yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.resolver.BaseResolver
):
    """PyYAML's reader without its YAML 1.1 guesses; scalars are typed by `parse_scalar`."""

    def __init__(self, stream: str) -> None:
        yaml.reader.Reader.__init__(self, stream)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        yaml.resolver.BaseResolver.__init__(self)


def parse_scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) YAML scalar."""
    if _PATTERNS["null"].fullmatch(text):
        return None
    if _PATTERNS["bool"].fullmatch(text):
        return text.lower() == "true"
    if _PATTERNS["int"].fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _PATTERNS["float"].fullmatch(text):
        return float(
            text.replace(".inf", "inf").replace(".nan", "nan") if text.lower()[-3:] in ("inf", "nan") else text
        )
    return text


def read_yaml(text: str, origin: str, first_line: int | None = 1) -> Node:
    """Parse one YAML document.

    Args:
        text: the document; an empty one is an empty section.
        origin: the file's name for sources and errors.
        first_line: number of the first line, or None when lines mean nothing (command line).

    Raises:
        ConfigError: the text is not YAML, holds a duplicate key, a tag or a recursive alias, or is too large or nested
            too deeply.
    """
    try:
        root = _Composer(text).get_single_node()
        return Section(Source(origin, first_line)) if root is None else _Converter(origin, first_line).convert(root)
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply for a configuration") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = None if mark is None or first_line is None else mark.line + first_line
        raise ConfigError(f"{Source(origin, line)}: not valid YAML: {error.problem}{_quote_hint(text)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error


def _quote_hint(text: str) -> str:
    return "; a value holding { } [ ] , ${...} inside a list or braces must be quoted" if "{" in text else ""


class _Converter:
    """Turns PyYAML nodes into ours; `_open` holds the nodes above the current one, against recursive aliases."""

    def __init__(self, origin: str, first_line: int | None) -> None:
        self._origin = origin
        self._first_line = first_line
        self._open: list[int] = []
        self._num_nodes = 0

    def convert(self, node: yaml.Node) -> Node:
        source = self._source(node)
        if isinstance(node, yaml.MappingNode):
            self._count(node)
            section = Section(source)
            for key, child in self._items(node):
                section.children[key] = self.convert(child)
            self._open.pop()
            section.replaces = _take_override_mark(section)
            return section
        return Leaf(self._plain(node), source)

    def _source(self, node: yaml.Node) -> Source:
        return Source(self._origin, None if self._first_line is None else node.start_mark.line + self._first_line)

    def _items(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
        """Return the pairs of a mapping, which stays open until the caller has converted them."""
        self._enter(node)
        seen: dict[str, Source] = {}
        pairs = []
        for key_node, child in node.value:
            source = self._source(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{source}: a key must be a word, not a list or mapping")
            key = str(key_node.value)
            if key == "<<":
                raise ConfigError(f"{source}: merge keys (<<) are not supported; inherit with 'defaults:'")
            if "." in key or not key:
                raise ConfigError(f"{source}: key '{key}' is empty or holds a dot; write nested sections instead")
            if key in seen:
                raise ConfigError(f"{source}: key '{key}' occurs twice; the first one is at {seen[key]}")
            seen[key] = source
            child.start_mark = key_node.start_mark  # a value's line is the line of its key
            pairs.append((key, child))
        return pairs

    def _plain(self, node: yaml.Node) -> Any:
        """Return the plain Python value of a node."""
        self._count(node)
        if isinstance(node, yaml.MappingNode):
            values = {key: self._plain(child) for key, child in self._items(node)}
            self._open.pop()
            return values
        if isinstance(node, yaml.SequenceNode):
            self._enter(node)
            items = [self._plain(child) for child in node.value]
            self._open.pop()
            return items
        if not isinstance(node, yaml.ScalarNode) or node.tag not in (None, "!", _TAG + "str"):
            raise ConfigError(f"{self._source(node)}: tag {node.tag} is not supported; write the value without it")
        is_plain = node.style is None and node.tag != "!"
        return parse_scalar(node.value) if is_plain else node.value

    def _count(self, node: yaml.Node) -> None:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise ConfigError(
                f"{self._source(node)}: more than {_MAX_NODES} values, aliases expanded; that is no configuration"
            )

    def _enter(self, node: yaml.Node) -> None:
        if id(node) in self._open:
            raise ConfigError(f"{self._source(node)}: an alias refers to the section that holds it")
        self._open.append(id(node))


def _take_override_mark(section: Section) -> bool:
    mark = section.children.pop(OVERRIDE_MARK, None)
    if mark is None:
        return False
    if isinstance(mark, Section) or not isinstance(mark.value, bool):
        raise ConfigError(f"{mark.source}: {OVERRIDE_MARK} must be true or false")
    return mark.value
