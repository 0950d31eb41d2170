"""Turn pydantic's validation errors into lines that a user can act on: file and line, key, value, and what is allowed.

    configs/x.yaml:4: unknown key grpo.num_promts_per_step; did you mean num_prompts_per_step?

It words errors only; `rl.core.config_file.build` raises them.
"""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from rl.core.config_schema import (
    ConfigClass,
    allowed,
    alternatives_at,
    class_at,
    discriminator,
    field_at,
    literal_values,
    sections,
)
from rl.core.config_tree import CLASS_DEFAULT, MISSING, ConfigTree
from rl.core.config_view import scalar
from rl.core.renamed_keys import renamed

_SURE = 0.9  # similarity above which a key of the same section is meant, rather than the same name elsewhere
_SIMILAR_ELSEWHERE = 0.8
_MAX_PLACES = 3


def describe(errors: list[ErrorDetails], tree: ConfigTree, model: ConfigClass) -> list[str]:
    """Return one line per error, without duplicates, in the order of the classes."""
    lines: dict[str, None] = {}
    for error in errors:
        for line in _lines(error, tree, model):
            lines[line] = None
    return list(lines)


def key_path(location: tuple[int | str, ...], values: Any, model: ConfigClass) -> tuple[str, ...]:
    """Return the keys of an error's location, without the tags that pydantic puts in for members of a union."""
    path: list[str] = []
    is_tag = False
    for part in location:
        if is_tag:
            is_tag = False
            continue
        path.append(str(part))
        is_tag = discriminator(alternatives_at(model, tuple(path), values)) is not None
    return tuple(path)


def unset_mandatory(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the values that are still `???`."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from unset_mandatory(value, (*path, name))
    elif values == MISSING:
        yield path


def describe_unset(path: tuple[str, ...], tree: ConfigTree, model: ConfigClass) -> str:
    """Word the error of a mandatory value that nobody filled in."""
    key = ".".join(path)
    meaning = _meaning(path, tree, model)
    return f"{tree.source_of(key)}: {key} must be set, for example on the command line: {key}=...{meaning}"


def _lines(error: ErrorDetails, tree: ConfigTree, model: ConfigClass) -> list[str]:
    path = key_path(error["loc"], tree.values, model)
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):
        # A list that is too short: the list is what is wrong, not an item that nobody wrote.
        path = path[:-1]
    key = ".".join(path)
    source = _place(key, tree)
    match error["type"]:
        case "extra_forbidden":
            return list(_unknown(path, error["input"], tree, model))
        case "missing" if not isinstance(error["loc"][-1], int):
            return [f"{source}: {key} is required{_meaning(path, tree, model)}"]
        case "union_tag_invalid" | "union_tag_not_found":
            return [_wrong_kind(path, tree, model)]
    shown = "" if isinstance(error["input"], Mapping) else f"={scalar(error['input'])}"
    if error["type"] == "value_error":  # a validator of ours, which says more than a range could
        return [f"{source}: {key}{shown}: {error['ctx']['error']}"]
    info = field_at(model, path, tree.values)
    if info is None:  # an item of a list, or a value below a free mapping
        info = field_at(model, path[:-1], tree.values)
    expected = f"must be {allowed(info)}" if info is not None else error["msg"]
    return [f"{source}: {key}{shown}: {expected}{_suggest_choice(error, info)}{_meaning(path, tree, model)}"]


def _place(key: str, tree: ConfigTree) -> str:
    """Return the source of a key, or of the section in which it is missing, or the file."""
    while key:
        source = tree.source_of(key)
        if source != CLASS_DEFAULT:
            return str(source)
        key = key.rpartition(".")[0]
    return str(tree.path)


def _meaning(path: tuple[str, ...], tree: ConfigTree, model: ConfigClass) -> str:
    info = field_at(model, path, tree.values) if path else None
    return f" ({info.description.rstrip('.')})" if info is not None and info.description else ""


def _suggest_choice(error: ErrorDetails, info: Any) -> str:
    if error["type"] != "literal_error" or info is None:
        return ""
    choices = [str(value) for value in literal_values(info.annotation)]
    close = get_close_matches(str(error["input"]), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _wrong_kind(path: tuple[str, ...], tree: ConfigTree, model: ConfigClass) -> str:
    """Word a section that names no kind, or one that does not exist."""
    classes = alternatives_at(model, path, tree.values)
    name = discriminator(classes) or "kind"
    choices = [str(value) for cls in classes for value in literal_values(cls.model_fields[name].annotation)]
    key = ".".join((*path, name))
    section: Any = tree.values
    for part in path:
        section = section[part]
    if not isinstance(section, Mapping):
        return f"{tree.source_of('.'.join(path))}: {'.'.join(path)}={scalar(section)}: must be a section"
    if name not in section:
        return f"{_place(key, tree)}: {key} is required: one of {', '.join(choices)}"
    close = get_close_matches(str(section[name]), choices, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{tree.source_of(key)}: {key}={scalar(section[name])}: must be one of {', '.join(choices)}{hint}"


def _unknown(path: tuple[str, ...], value: Any, tree: ConfigTree, model: ConfigClass) -> Iterator[str]:
    """Word an unknown key; a renamed one below an unknown section has a line of its own."""
    key = ".".join(path)
    if renamed(key) is None and isinstance(value, Mapping):
        moved = [below for below in value if renamed(f"{key}.{below}") is not None]
        for below in moved:
            yield f"{tree.source_of(f'{key}.{below}')}: unknown key {key}.{below}: {renamed(f'{key}.{below}')}"
        if moved:
            return
    yield f"{tree.source_of(key)}: unknown key {key}{_instead(path, value, tree, model)}"


def _instead(path: tuple[str, ...], value: Any, tree: ConfigTree, model: ConfigClass) -> str:
    """Say what to write instead of an unknown key."""
    if isinstance(value, Mapping):
        details = [text for below in value if (text := renamed(".".join((*path, below)))) is not None]
        if details:
            return ": " + "; ".join(dict.fromkeys(details))
    if (text := renamed(".".join(path))) is not None:
        return f": {text}"
    section, name = path[:-1], path[-1]
    owner = class_at(model, section, tree.values)
    for cls in alternatives_at(model, section, tree.values):
        if name in cls.model_fields and owner is not None:
            return _other_kind(section, name, cls, owner, tree)
    known = list(owner.model_fields) if owner is not None else []
    close = get_close_matches(name, known, n=1)
    is_sure = bool(close) and SequenceMatcher(None, name, close[0]).ratio() >= _SURE
    places = _places(name, model)
    if places and not is_sure:
        where = " or ".join(places[:_MAX_PLACES])
        return f"; it belongs to {where}: write {places[0]}.{name}" if len(places) == 1 else f"; it belongs to {where}"
    if close:
        return f"; did you mean {close[0]}?"
    elsewhere = _similar_elsewhere(name, model)
    if elsewhere:
        return f"; did you mean {elsewhere}?"
    return f"; keys here: {', '.join(known)}; your own keys go under extras:" if known else ""


def _other_kind(section: tuple[str, ...], name: str, cls: ConfigClass, owner: ConfigClass, tree: ConfigTree) -> str:
    """Word a key of another member of the union, as is left over from a parent file when the kind changes."""
    by = discriminator([cls, owner]) or "kind"
    key = ".".join(section)
    theirs, ours = (literal_values(each.model_fields[by].annotation)[0] for each in (cls, owner))
    chosen = f"{key}.{by} is {ours} ({tree.source_of(f'{key}.{by}')})"
    fix = f"to replace an inherited section, put _override_: true into {key}"
    return f"; {name} belongs to {by} {theirs}, but {chosen}; {fix}"


def _places(name: str, model: ConfigClass) -> list[str]:
    """Return the sections that have a field of this name."""
    found = [place.key for place in sections(model) if name in place.cls.model_fields]
    return list(dict.fromkeys(found))


def _similar_elsewhere(name: str, model: ConfigClass) -> str | None:
    keys = {field: f"{place.key}.{field}" for place in sections(model) for field in place.cls.model_fields}
    close = get_close_matches(name, list(keys), n=1, cutoff=_SIMILAR_ELSEWHERE)
    return keys[close[0]] if close else None
