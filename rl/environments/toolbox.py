"""Run a tool for a call of the model; runs inside scoring processes.

A tool is a function of a module; the call's arguments are its own, checked against its annotations before it runs.
"""

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl.environments.reward_function import called, load_function

_JSON_NAMES: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


@dataclass(frozen=True)
class Tool:
    """What a scoring process needs to know of a tool.

    Attributes:
        name: As calls give it.
        target: module:function.
        settings: Arguments that the configuration sets and no call may give.
    """

    name: str
    target: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ToolOutcome:
    """What a call came to.

    Attributes:
        text: The result, or in words for the model what is wrong.
        is_valid: Whether the tool could be called like that at all.
        is_ok: Whether the tool gave a result.
    """

    text: str
    is_valid: bool = True
    is_ok: bool = True


def prepare_tools(targets: tuple[str, ...], preparations: tuple[str, ...]) -> None:
    """Import the tools and call what they need first, so that no deadline pays for it.

    Raises:
        ConfigError: there is no such module or function, it cannot be called, or this machine cannot run a tool.
    """
    for target in targets:
        load_function(target)
    for preparation in preparations:
        load_function(preparation)()


def use_tool(tool: Tool, arguments: Mapping[str, Any], max_chars: int) -> ToolOutcome:
    """Call a tool; whatever it raises is an outcome in words.

    Args:
        tool: What to call.
        arguments: Those of the call.
        max_chars: Longest text of the outcome; the rest is left out, so that it need not be sent.
    """
    function = load_function(tool.target)
    fault = argument_fault(function, arguments, tool.settings)
    if fault:
        return ToolOutcome(f"{tool.name}: {fault}", is_valid=False, is_ok=False)
    try:
        return ToolOutcome(_plain(_text(called(function, {**arguments, **tool.settings})), max_chars))
    except Exception as error:  # a boundary: tools are foreign code, and the model is told what they say
        return ToolOutcome(_plain(f"{tool.name}: {_words_of(error)}", max_chars), is_ok=False)


def argument_fault(function: Callable[..., Any], arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return why the function does not take these arguments; empty when it does."""
    signature = inspect.signature(function)
    parameters = {name: parameter for name, parameter in signature.parameters.items() if name not in settings}
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in arguments if name not in named and (name in settings or not takes_any)]
    if unknown:
        return f"unknown argument {unknown[0]!r:.40}; it takes {', '.join(named) or 'none'}"
    missing = [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in arguments]
    if missing:
        return f"missing argument {', '.join(map(repr, missing))}"
    hints = _hints(function)
    wrong = [name for name in arguments if name in hints and not _fits(arguments[name], hints[name])]
    if wrong:
        expected = " or ".join(_JSON_NAMES[kind] for kind in hints[wrong[0]])
        return f"argument {wrong[0]!r} must be {expected}, not {_JSON_NAMES.get(type(arguments[wrong[0]]), 'that')}"
    return ""


def _hints(function: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Return the JSON types of each annotated parameter; annotations of other kinds are not checked."""
    source = function if inspect.isroutine(function) else type(function).__call__
    try:
        annotations = typing.get_type_hints(source)
    except (NameError, TypeError):
        return {}
    kinds = {name: _kinds(annotation) for name, annotation in annotations.items() if name != "return"}
    return {name: found for name, found in kinds.items() if found}


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Return the plain JSON types that an annotation allows; empty when it is more than a union of them."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    kinds = tuple(typing.get_origin(member) or member for member in members)
    return kinds if all(kind in _JSON_NAMES for kind in kinds) else ()


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _text(result: object) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _plain(text: str, max_chars: int) -> str:
    """Return the beginning of a text as what every tokenizer takes: JSON may hold half a surrogate pair, UTF-8 not."""
    return text[:max_chars].encode(errors="replace").decode()


def _words_of(error: Exception) -> str:
    kind = type(error).__name__
    try:
        words = str(error)
    except Exception:  # the text of a foreign error is made by foreign code
        return kind
    return words if words and isinstance(error, ValueError) else f"{kind}: {words}".rstrip(": ")
