"""Find tool calls in a completion. It knows no tools: whether a name exists is the toolbox's business.

    <tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>

Model output is untrusted: whatever stands between or beside the tags gives a call or a fault in words, never an error.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Levels of objects and lists in the arguments; what Python reads in JSON can be too deep to be passed on.
MAX_DEPTH = 32


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CallFault:
    """Something that was meant as a call; `words` tell the model what is wrong with it."""

    words: str


def parse_calls(text: str, opening: str, closing: str) -> list[ToolCall | CallFault]:
    """Return the calls of a completion in order; empty when it has none.

    A last call without its closing tag is taken up to the end of the text: engines cut stop strings off.
    """
    pieces = [(match[0], match.start(), match.end()) for match in _tags(opening, closing).finditer(text)]
    found: list[ToolCall | CallFault] = []
    start: int | None = None
    for tag, begin, end in pieces:
        if tag == opening:
            if start is not None:
                found.append(CallFault(f"the call before the second {opening} is not closed by {closing}"))
            start = end
        elif start is None:
            found.append(CallFault(f"{closing} without {opening} before it"))
        else:
            found.append(parse_call(text[start:begin]))
            start = None
    if start is not None:
        found.append(parse_call(text[start:]))
    return found


def parse_call(text: str) -> ToolCall | CallFault:
    """Read one call: a JSON object with a name and an object of arguments, and nothing else."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return CallFault('the call is not valid JSON; write {"name": ..., "arguments": {...}}')
    if not isinstance(call, dict):
        return CallFault(f"the call must be a JSON object, not {_kind(call)}")
    if unknown := sorted(set(call) - {"name", "arguments"}):
        return CallFault(f"the call has the unknown key {unknown[0]!r:.40}; it takes name and arguments")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str):
        return CallFault("the call has no name" if name is None else f"the name must be text, not {_kind(name)}")
    if not isinstance(arguments, dict):
        return CallFault(f"the arguments must be a JSON object, not {_kind(arguments)}")
    if _is_deeper(arguments, MAX_DEPTH):
        return CallFault(f"the arguments are nested more than {MAX_DEPTH} levels deep")
    return ToolCall(name, arguments)


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a value has more levels of objects and lists; looked at level by level, as a deep one ends recursions."""
    outer = [value]
    for _ in range(levels):
        inner = [part for each in outer for part in (each.values() if isinstance(each, dict) else _items(each))]
        outer = [part for part in inner if isinstance(part, dict | list)]
    return bool(outer)


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tags(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(tag) for tag in sorted({opening, closing}, key=len, reverse=True)))


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
