"""What a cross-section check of the configuration reports: the keys, their values, and a fix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rl.controller.config import MasterConfig
from rl.core.config import ConfigModel
from rl.core.config_view import scalar


@dataclass(frozen=True)
class Conflict:
    """Two or more settings that cannot go together.

    Attributes:
        keys: their dotted keys; the message adds where each was written.
        problem: what is wrong, with the values.
        fix: what to write instead.
    """

    keys: tuple[str, ...]
    problem: str
    fix: str


Check = Callable[[MasterConfig], Iterator[Conflict]]


def is_changed(section: ConfigModel, name: str) -> bool:
    """Say whether a field differs from its class default."""
    value: Any = dict(section)[name]
    return bool(value != type(section).model_fields[name].get_default(call_default_factory=True))


def inert(section: ConfigModel, prefix: str, names: list[str], reason_key: str, reason: str) -> Iterator[Conflict]:
    """Yield a conflict for each changed field that has no effect because of another setting."""
    for name in names:
        if is_changed(section, name):
            key = f"{prefix}.{name}"
            problem = f"{key}={scalar(dict(section)[name])} has no effect: {reason}"
            yield Conflict((key, reason_key), problem, f"remove {key}")
