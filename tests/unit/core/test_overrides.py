"""Overrides of the command line."""

from typing import Any

import pytest

from rl.core.config_tree import COMMAND_LINE, Section, find, plain_values
from rl.core.errors import ConfigError
from rl.core.overrides import apply_overrides
from rl.core.yaml_reader import read_yaml


def _tree() -> Section:
    root = read_yaml("a: {b: 1, c: {d: 2}}\n", "x.yaml")
    assert isinstance(root, Section)
    return root


def _applied(*overrides: str) -> dict[str, Any]:
    return plain_values(apply_overrides(_tree(), overrides))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=5", {"a": {"b": 5, "c": {"d": 2}}}),
        ("a.b=1e-6", {"a": {"b": 1e-6, "c": {"d": 2}}}),
        ("a.b=null", {"a": {"b": None, "c": {"d": 2}}}),
        ("a.b=[1, x]", {"a": {"b": [1, "x"], "c": {"d": 2}}}),
        ("a.b=x=y", {"a": {"b": "x=y", "c": {"d": 2}}}),
        ("a.b='5'", {"a": {"b": "5", "c": {"d": 2}}}),
        ("a.c={e: 3}", {"a": {"b": 1, "c": {"d": 2, "e": 3}}}),
        ("a.c={_override_: true, e: 3}", {"a": {"b": 1, "c": {"e": 3}}}),
        ("+a.new.key=x", {"a": {"b": 1, "c": {"d": 2}, "new": {"key": "x"}}}),
        ("++a.b=7", {"a": {"b": 7, "c": {"d": 2}}}),
        ("~a.b", {"a": {"c": {"d": 2}}}),
        ("~a.c.d", {"a": {"b": 1, "c": {}}}),
        ("~a", {}),
    ],
)
def test_forms(override: str, expected: dict[str, Any]) -> None:
    assert _applied(override) == expected


def test_later_overrides_win() -> None:
    assert _applied("a.b=5", "a.b=6")["a"]["b"] == 6


def test_a_value_that_is_overridden_comes_from_the_command_line() -> None:
    node = find(apply_overrides(_tree(), ["a.b=5"]), ("a", "b"))
    assert node is not None
    assert node.source == COMMAND_LINE


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", r"'a.b' is not of the form key=value"),
        ("my_run.yaml", r"--config my_run.yaml"),
        ("=5", r"is not a dotted key"),
        ("a..b=5", r"is not a dotted key"),
        ("a.b=", r"has no value; write a.b=null"),
        ("a.b=[1", r"command line: not valid YAML"),
        ("+a.b=5", r"adds a key that x.yaml:1 sets already"),
        ("~a.x", r"removes a key that no file sets"),
    ],
)
def test_what_cannot_be_read_is_an_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _applied(override)
