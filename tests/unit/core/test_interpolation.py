"""`${...}` is replaced after merging."""

from typing import Any

import pytest

from rl.core.config import ConfigModel
from rl.core.config_tree import Section
from rl.core.errors import ConfigError
from rl.core.interpolation import resolve
from rl.core.yaml_reader import read_yaml


class Inner(ConfigModel):
    size: int = 3


class Outer(ConfigModel):
    inner: Inner = Inner()
    other: int = 0


def _resolve(text: str, schema: type[ConfigModel] | None = None) -> dict[str, Any]:
    root = read_yaml(text, "x.yaml")
    assert isinstance(root, Section)
    return resolve(root, schema)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${a.b}", 4),
        ("${.other}", "text"),
        ("${..a.b}", 4),
        ("n-${a.b}-${a.c}", "n-4-true"),
        ("${add:${a.b},1}", 5),
        ("${add:1,2,3}", 6),
        ("${mul:${a.b},0.5}", 2.0),
        ("${div:${a.b},2}", 2),
        ("${div:${a.b},8}", 0.5),
        ("${max:${a.b},7}", 7),
        ("${max:${mul:${a.b},3},7}", 12),
        ("\\${a.b}", "${a.b}"),
        ("${a.list}", [1, 4]),
    ],
)
def test_expressions(expression: str, value: object) -> None:
    text = f"a: {{b: 4, c: true, list: [1, '${{a.b}}']}}\ns:\n  other: text\n  value: '{expression}'\n"
    resolved = _resolve(text)["s"]["value"]
    assert resolved == value
    assert type(resolved) is type(value)


def test_a_whole_section_can_be_referred_to() -> None:
    assert _resolve("a: {b: 1, c: '${.b}'}\nd: ${a}\n")["d"] == {"b": 1, "c": 1}


def test_a_key_that_no_file_sets_has_its_class_default() -> None:
    assert _resolve("other: ${mul:${inner.size},2}\n", Outer)["other"] == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${b}\nb: ${c}\nc: ${a}\n", r"circle: a -> b -> c -> a"),
        ("a: ${a}\n", r"x.yaml:1: interpolation goes round in a circle: a -> a"),
        ("s: {a: '${s}'}\n", r"circle"),
        ("a: ${b.c}\n", r"x.yaml:1: \$\{b.c\} refers to b.c, which does not exist"),
        ("a: ${...b}\n", r"goes above the top"),
        ("a: ${sub:1,2}\n", r"'sub' in .* is none of add, div, max, mul"),
        ("a: ${add:1,x}\n", r"needs numbers, 'x' is 'x'"),
        ("a: ${add:1}\n", r"at least two numbers"),
        ("a: ${div:1,0}\n", r"divides by zero"),
        ("a: ${b\nb: 1\n", r"lacks a closing brace"),
        ("a: n-${b}\nb: ???\n", r"refer to a single value that is set"),
    ],
)
def test_what_cannot_be_resolved_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(text)
