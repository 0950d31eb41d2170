"""Rows that show what a setting does: its values, and what a real function gives for each of them.

    Flip("grpo.normalize_rewards", ("true", "false"), trained)      # every two values give different results
    Refused("policy.generation.top_p", "0.9", "training takes 1.0 alone")
    Elsewhere("tests/unit/telemetry/test_console.py", "test_...", ("LoggerConfig.console",))

A field is written Class.field, so that one row stands for one member of a union. The tables are in `knob_rows_*.py`,
the functions that look at a configuration in `knob_probes*.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rl.controller.config import MasterConfig
from rl.core.config import ConfigModel
from rl.core.config_schema import is_operational, leaf_fields, literal_values, sections
from tests.support.knob_workshop import Case

Probe = Callable[[Case], Any]


@dataclass(frozen=True)
class Knob:
    """A field of a configuration class.

    Attributes:
        name: Class.field.
        operational: It says how a run is carried out, not what it computes.
        choices: Its values where there are few: those of a Literal, or true and false.
    """

    name: str
    operational: bool
    choices: tuple[Any, ...]


@dataclass(frozen=True)
class Flip:
    """Every two of the values make `probe` give different results.

    Attributes:
        key: Dotted key of a value, or of a section whose kinds are compared.
        values: YAML texts, or such a text with the overrides that it needs beside it.
        probe: What is looked at.
        base: Overrides under which the values are accepted.
        field: The field of the section that is meant, where its value needs others beside it.
    """

    key: str
    values: tuple[str | tuple[str, ...], ...]
    probe: Probe
    base: tuple[str, ...] = ()
    field: str = ""

    @property
    def label(self) -> str:
        """For the name of a test."""
        return f"{self.key}-{self.probe.__name__}"

    def overrides(self) -> list[tuple[str, ...]]:
        """What is written for each value."""
        written = [(value,) if isinstance(value, str) else value for value in self.values]
        return [(*self.base, f"{self.key}={text}", *beside) for text, *beside in written]

    @property
    def subject(self) -> str:
        """Dotted key of the field that is meant."""
        return f"{self.key}.{self.field}" if self.field else self.key


@dataclass(frozen=True)
class Refused:
    """The value is refused, in words that name the key."""

    key: str
    value: str
    words: str
    base: tuple[str, ...] = ()


@dataclass(frozen=True)
class Elsewhere:
    """Another test shows what the fields do: it needs processes, services or time."""

    file: str
    test: str
    fields: tuple[str, ...]


def all_knobs() -> dict[str, Knob]:
    """Every field of every class that can stand somewhere in a configuration, by Class.field."""
    classes = {MasterConfig} | {place.cls for place in sections(MasterConfig)}
    knobs = (_knob(cls, name, info) for cls in classes for name, info in leaf_fields(cls))
    return {knob.name: knob for knob in knobs}


def _knob(cls: type[ConfigModel], name: str, info: FieldInfo) -> Knob:
    choices = tuple(literal_values(info.annotation))
    if info.annotation is bool:
        choices = (True, False)
    return Knob(f"{cls.__name__}.{name}", is_operational(info), choices)


def found_at(config: MasterConfig, key: str) -> tuple[str, Any]:
    """Return the field (Class.field) and the value at a dotted key; for a section, the field that names its kind."""
    owner: Any = config
    parts = key.split(".")
    for part in parts[:-1]:
        owner = owner[part] if isinstance(owner, Mapping) else dict(owner)[part]
    value = owner[parts[-1]] if isinstance(owner, Mapping) else dict(owner)[parts[-1]]
    if isinstance(value, ConfigModel):
        kind = _kind_field(type(value))
        return f"{type(value).__name__}.{kind}", dict(value)[kind]
    if isinstance(owner, Mapping):  # an entry of a free mapping belongs to the field that holds the mapping
        return found_at(config, ".".join(parts[:-1]))
    return f"{type(owner).__name__}.{parts[-1]}", value


def _kind_field(cls: type[ConfigModel]) -> str:
    for name, info in cls.model_fields.items():
        if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            return name
    raise AssertionError(f"{cls.__name__} has no kind; give the key of a value")
