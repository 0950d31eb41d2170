"""Write a resolved configuration with the source of every value; the text is YAML and loads to the same values."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rl.core.config_tree import ConfigTree, Source
from rl.core.yaml_reader import parse_scalar

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*(:[\w./-]+)*")
_YAML_1_1_WORD = re.compile(r"y|n|yes|no|on|off", re.IGNORECASE)


@dataclass(frozen=True)
class ResolvedLine:
    """One line of a resolved configuration; a section's line has neither value nor source."""

    depth: int
    name: str
    value: str | None
    source: Source | None


def resolved_lines(config: BaseModel, tree: ConfigTree) -> Iterator[ResolvedLine]:
    """Yield the lines of a configuration in the order of its classes."""
    return _lines(dict(config), tree, "", 0)


def to_yaml(config: BaseModel, tree: ConfigTree) -> str:
    """Return the configuration as YAML with the source of every value in a comment."""
    rows = []
    for line in resolved_lines(config, tree):
        text = f"{'  ' * line.depth}{line.name}:" + ("" if line.value is None else f" {line.value}")
        rows.append((text, "" if line.source is None else f"# {line.source}"))
    width = min(60, max((len(text) for text, comment in rows if comment), default=0))
    return "".join(f"{text:<{width}}  {comment}\n" if comment else f"{text}\n" for text, comment in rows)


def scalar(value: Any) -> str:
    """Return a plain value as YAML on one line; it reads back as the same value, also with a YAML 1.1 reader."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float():
            text = repr(value)
            if math.isfinite(value):
                return text.replace("e", ".0e") if "e" in text and "." not in text else text
            return {"inf": ".inf", "-inf": "-.inf"}.get(text, ".nan")
        case str():
            literal = value.replace("${", "\\${")
            is_plain = (
                _PLAIN.fullmatch(literal) and not _YAML_1_1_WORD.fullmatch(literal) and parse_scalar(literal) == literal
            )
            return literal if is_plain else json.dumps(literal, ensure_ascii=False)
        case list() | tuple():
            return "[" + ", ".join(scalar(item) for item in value) + "]"
        case Mapping():
            return "{" + ", ".join(f"{scalar(key)}: {scalar(item)}" for key, item in value.items()) + "}"
    return str(value)


def _lines(section: Mapping[str, Any], tree: ConfigTree, prefix: str, depth: int) -> Iterator[ResolvedLine]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        inner = dict(value) if isinstance(value, BaseModel) else value
        if isinstance(inner, Mapping) and inner:
            yield ResolvedLine(depth, name, None, None)
            yield from _lines(inner, tree, key + ".", depth + 1)
        else:
            yield ResolvedLine(depth, name, scalar(inner), tree.source_of(key))
