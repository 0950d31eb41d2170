"""A configuration before validation: plain values, and where each of them was written.

`Section` and `Leaf` are what files and overrides are merged as; `ConfigTree` is the finished, resolved result.
Nothing here knows the configuration classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.core.errors import ConfigError

MISSING = "???"


@dataclass(frozen=True)
class Source:
    """Where a value comes from: a file and line, or the command line (then without a line)."""

    origin: str
    line: int | None = None

    def __str__(self) -> str:
        return self.origin if self.line is None else f"{self.origin}:{self.line}"


COMMAND_LINE = Source("command line")
CLASS_DEFAULT = Source("class default")


@dataclass
class Leaf:
    """One value; lists are leaves, so they replace each other as a whole."""

    value: Any
    source: Source


@dataclass
class Section:
    """A mapping; `replaces` says that it carried `_override_: true`."""

    source: Source
    children: dict[str, "Section | Leaf"] = field(default_factory=dict)
    replaces: bool = False


Node = Section | Leaf


@dataclass(frozen=True)
class ConfigTree:
    """The resolved values of one configuration, with their sources.

    Attributes:
        values: nested plain values, as written (class defaults are not in it).
        sources: source of every value and section, by dotted key.
        path: the file that was asked for.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, Source]
    path: Path

    def source_of(self, key: str) -> Source:
        """Return where the value of a dotted key was written: itself, the list or section holding it, or the class."""
        at: Any = self.values
        for part in key.split("."):
            if not isinstance(at, Mapping):
                break  # an item of a list
            if part not in at:
                return CLASS_DEFAULT
            at = at[part]
        while key not in self.sources:
            key = key.rpartition(".")[0]
        return self.sources[key]


def merge(base: Section, child: Section) -> Section:
    """Return `base` overridden by `child`: sections merge, everything else is replaced."""
    merged = Section(child.source, dict(base.children))
    for key, node in child.children.items():
        below = base.children.get(key)
        if isinstance(node, Section):
            start = below if isinstance(below, Section) and not node.replaces else Section(node.source)
            merged.children[key] = merge(start, node)
        else:
            merged.children[key] = node
    return merged


def find(root: Section, path: tuple[str, ...]) -> Node | None:
    """Return the node at `path`, or None."""
    node: Node | None = root
    for part in path:
        node = node.children.get(part) if isinstance(node, Section) else None
    return node


def plain_values(section: Section) -> dict[str, Any]:
    """Return the values below a section as they are written, interpolations included."""
    return {
        name: plain_values(node) if isinstance(node, Section) else node.value for name, node in section.children.items()
    }


def nested(path: tuple[str, ...], node: Node) -> Section:
    """Wrap `node` in sections so that it stands at `path`."""
    for part in reversed(path):
        node = Section(node.source, {part: node})
    if isinstance(node, Leaf):
        raise ConfigError(f"{node.source}: a value needs a key")
    return node


def iterate_sources(section: Section, prefix: str = "") -> Iterator[tuple[str, Source]]:
    """Yield the dotted key and source of every node below `section`."""
    for name, node in section.children.items():
        key = f"{prefix}{name}"
        yield key, node.source
        if isinstance(node, Section):
            yield from iterate_sources(node, key + ".")
