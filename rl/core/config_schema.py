"""Look into configuration classes: which keys a section has, of which type and range, and with which default.

Used by error messages, the generated reference, the checker of defaults, interpolation and the fingerprint. It reads
classes only; values are validated by pydantic.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from rl.core.config import OPERATIONAL, ROLE, ConfigModel

ConfigClass = type[ConfigModel]


@dataclass(frozen=True)
class SectionDoc:
    """One place where a class stands; `variant` is its `kind=...` where several classes can stand there."""

    key: str
    cls: ConfigClass
    variant: str


def is_operational(info: FieldInfo) -> bool:
    """Say whether a field was declared with `operational(...)`."""
    return isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get(ROLE) == OPERATIONAL


def section_classes(annotation: Any) -> list[ConfigClass]:
    """Return the configuration classes that a field of this annotation may hold; none for a leaf."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return section_classes(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [cls for member in get_args(annotation) for cls in section_classes(member)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, ConfigModel) else []


def named_section_classes(annotation: Any) -> list[ConfigClass]:
    """Return the classes of a mapping from free names to sections (`env`); none for anything else."""
    if get_origin(annotation) is dict:
        return section_classes(get_args(annotation)[1])
    return []


def discriminator(classes: list[ConfigClass]) -> str | None:
    """Return the field whose literal value tells the classes apart."""
    if len(classes) < 2:
        return None
    for name in classes[0].model_fields:
        if not all(name in cls.model_fields for cls in classes):
            continue
        values = [literal_values(cls.model_fields[name].annotation) for cls in classes]
        if all(values) and len(set(chain(*values))) == len(list(chain(*values))):
            return name
    return None


def literal_values(annotation: Any) -> list[Any]:
    """Return the values of a Literal, also inside `Literal[...] | None`."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return [value for member in get_args(annotation) for value in literal_values(member)]
    return []


def member(classes: list[ConfigClass], values: Any) -> ConfigClass | None:
    """Return the class that a section's values choose; None when they choose none."""
    name = discriminator(classes)
    if name is None:
        return classes[0] if classes else None
    chosen = values.get(name) if isinstance(values, Mapping) else None
    for cls in classes:
        info = cls.model_fields[name]
        if chosen in literal_values(info.annotation) or (chosen is None and not info.is_required()):
            return cls
    return None


def alternatives_at(model: ConfigClass, path: tuple[str, ...], values: Any) -> list[ConfigClass]:
    """Return the classes that can stand at `path` below `model` (several for a union); `values` choose on the way."""
    classes: list[ConfigClass] = [model]
    named: list[ConfigClass] = []
    for part in path:
        if named:
            classes, named = named, []
        else:
            cls = member(classes, values)
            info = cls.model_fields.get(part) if cls is not None else None
            classes = section_classes(info.annotation) if info is not None else []
            named = named_section_classes(info.annotation) if info is not None else []
        values = values.get(part) if isinstance(values, Mapping) else None
        if not classes and not named:
            return []
    return classes


def class_at(model: ConfigClass, path: tuple[str, ...], values: Any) -> ConfigClass | None:
    """Return the class of the section at `path` of `values`; None when there is no section or its kind is unknown."""
    at = values
    for part in path:
        at = at.get(part) if isinstance(at, Mapping) else None
    return member(alternatives_at(model, path, values), at)


def field_at(model: ConfigClass, path: tuple[str, ...], values: Any) -> FieldInfo | None:
    """Return the field that the last part of `path` names."""
    owner = class_at(model, path[:-1], values)
    return owner.model_fields.get(path[-1]) if owner is not None else None


def default_at(model: ConfigClass, path: tuple[str, ...], values: Any) -> tuple[bool, Any]:
    """Return (True, class default) of the key at `path` of `values`, or (False, None) when there is none."""
    info = field_at(model, path, values)
    if info is None or info.is_required():
        return False, None
    value = info.get_default(call_default_factory=True)
    return True, value.model_dump(mode="json") if isinstance(value, ConfigModel) else value


def sections(model: ConfigClass, key: str = "") -> Iterator[SectionDoc]:
    """Yield every section below `model`, parents first; a free name of a mapping is written `<name>`."""
    for name, info in model.model_fields.items():
        below = f"{key}.{name}" if key else name
        classes = section_classes(info.annotation)
        if not classes:
            classes, below = named_section_classes(info.annotation), f"{below}.<name>"
        by = discriminator(classes)
        for cls in classes:
            variant = "" if by is None else f"{by}={literal_values(cls.model_fields[by].annotation)[0]}"
            yield SectionDoc(below, cls, variant)
            yield from sections(cls, below)


def leaf_fields(cls: ConfigClass) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a class that hold values rather than sections."""
    for name, info in cls.model_fields.items():
        if not section_classes(info.annotation) and not named_section_classes(info.annotation):
            yield name, info


def allowed(info: FieldInfo) -> str:
    """Describe what a field accepts, for example `int >= 1 or null`."""
    return _describe(info.annotation, _bounds(info))


def _bounds(info: FieldInfo) -> str:
    found = []
    for constraint in info.metadata:
        match constraint:
            case annotated_types.Ge(bound):
                found.append(f">= {bound}")
            case annotated_types.Gt(bound):
                found.append(f"> {bound}")
            case annotated_types.Le(bound):
                found.append(f"<= {bound}")
            case annotated_types.Lt(bound):
                found.append(f"< {bound}")
    return " and ".join(found)


def _describe(annotation: Any, bounds: str = "") -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        metadata = FieldInfo.from_annotation(annotation)
        return _describe(arguments[0], _bounds(metadata))
    if origin is Literal:
        return " or ".join("null" if value is None else str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        # Two sections read the same.
        parts = dict.fromkeys(_describe(part, "" if part is type(None) else bounds) for part in arguments)
        return " or ".join(parts)
    if origin is list:
        return f"list of {_describe(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(_describe(part) for part in arguments) + "]"
    if origin is dict or annotation is dict:
        return "a mapping"
    if section_classes(annotation):
        return "a section"
    names: dict[Any, str] = {
        type(None): "null",
        None: "null",
        str: "text",
        bool: "true or false",
        typing.Any: "anything",
    }
    name = names.get(annotation) or annotation.__name__
    return f"{name} {bounds}" if bounds else name
