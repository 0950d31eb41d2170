"""Call a user's reward function and check what it returns; runs inside scoring processes."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, SupportsFloat, cast

from rl.core.errors import DataError
from rl.core.imports import import_object
from rl.environments.config import component_name_fault

# Training computes with 32 bits, also the squares of rewards.
LARGEST_REWARD = 1e18


@dataclass(frozen=True)
class Fault:
    """Why there is no number, in words."""

    words: str


# What a function gave for one sample: its reward, or its components by name.
Value = float | Fault
SampleValue = Value | dict[str, Value]


def prepare_functions(targets: tuple[str, ...]) -> None:
    """Import the functions, so that no deadline pays for it.

    Raises:
        ConfigError: there is no such module or function, or it cannot be called.
    """
    for target in targets:
        load_function(target)


def call_function(target: str, prompt: object, completions: list[str], columns: Mapping[str, Any]) -> list[SampleValue]:
    """Score one group: every argument is a list with one entry per completion.

    Returns:
        One entry per completion: a finite number, such numbers by component, or what the function gave instead.

    Raises:
        DataError: the row lacks a column that the function needs.
        Exception: whatever the function raises.
    """
    function = load_function(target)
    count = len(completions)
    arguments = {"prompts": [prompt] * count, "completions": completions} | {
        name: [value] * count for name, value in columns.items() if name not in ("prompts", "completions")
    }
    result = called(function, _accepted(function, target, arguments))
    fault = _group_fault(result, count)
    return [Fault(fault)] * count if fault else [_sample_value(value) for value in result]


def load_function(target: str) -> Callable[..., Any]:
    """Import `module:function`.

    Raises:
        ConfigError: there is no such module or function.
        DataError: it cannot be called.
    """
    function = import_object(target)
    if not callable(function):
        raise DataError(f"'{target}' is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)


def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return what the function returns; one that is async is awaited."""
    result = function(**arguments)
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


def _accepted(function: Callable[..., Any], target: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keep the arguments that the function names, all of them when it takes **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if missing:
        raise DataError(
            f"{target} needs the column(s) {', '.join(missing)}; the row has {', '.join(sorted(arguments))}"
        )
    return arguments


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _group_fault(result: object, count: int) -> str:
    """Return why the result cannot be the rewards of `count` completions; empty when it can."""
    expected = f"expected a list of {count} rewards"
    if result is None:
        return f"returned None, {expected}"
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Sized) or not isinstance(result, Iterable):
        return f"returned {result!r:.80} of type {type(result).__name__}, {expected}"
    if len(result) != count:
        return f"returned {len(result)} rewards for {count} completions"
    return ""


def _sample_value(value: object) -> SampleValue:
    if not isinstance(value, Mapping):
        return _number(value)
    parts = {str(name): _number(part) for name, part in value.items()}
    faults = [fault for name in parts if (fault := component_name_fault(name))]
    return Fault(f"returned a component whose {faults[0]}") if faults else parts


def _number(value: object) -> Value:
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            return Fault(f"returned {value!r:.80}, which is no number ({error})")
        return Fault(fault) if (fault := size_fault(number)) else number
    return Fault(f"returned {value!r:.80} of type {type(value).__name__}")


def size_fault(number: float) -> str:
    """Return why a number cannot be a reward; empty when it can."""
    if not math.isfinite(number):
        return f"returned {number}"
    return f"returned {number:g}, beyond {LARGEST_REWARD:g}" if abs(number) > LARGEST_REWARD else ""
