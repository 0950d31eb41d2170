"""YAML is read with lines, YAML 1.2 scalars, and no silent surprises."""

import math

import pytest

from rl.core.config_tree import Leaf, Section
from rl.core.errors import ConfigError
from rl.core.yaml_reader import parse_scalar, read_yaml


def _section(text: str) -> Section:
    node = read_yaml(text, "x.yaml")
    assert isinstance(node, Section)
    return node


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-8", 1e-8),
        ("1.5", 1.5),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2E+3", -2000.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("yes", "yes"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("e5", "e5"),
        ("package:a/b.gguf", "package:a/b.gguf"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_quoted_scalars_are_text() -> None:
    section = _section("a: '1'\nb: \"true\"\n")
    assert [node.value for node in section.children.values() if isinstance(node, Leaf)] == ["1", "true"]


def test_a_value_remembers_the_line_of_its_key() -> None:
    section = _section("a:\n  b: 1\n  c:\n    - 1\n    - 2\n")
    inner = section.children["a"]
    assert isinstance(inner, Section)
    assert str(inner.children["b"].source) == "x.yaml:2"
    assert str(inner.children["c"].source) == "x.yaml:3"


def test_an_empty_document_is_an_empty_section() -> None:
    assert _section("# nothing\n").children == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", r"x.yaml:2: key 'a' occurs twice; the first one is at x.yaml:1"),
        ("x:\n  - {a: 1, a: 2}\n", r"x.yaml:2: key 'a' occurs twice"),
        ("a.b: 1\n", r"x.yaml:1: key 'a.b' is empty or holds a dot"),
        ("a: !!python/name:os.system x\n", r"x.yaml:1: tag .* is not supported"),
        ("a: &x\n  b: *x\n", r"an alias refers to the section that holds it"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", r"x.yaml:3: merge keys"),
        ("? [1]\n: 2\n", r"x.yaml:1: a key must be a word"),
        ("a: [1, 2\n", r"x.yaml:\d: not valid YAML"),
        ("a: 1\n  b: 2\n", r"x.yaml:2: not valid YAML"),
        ("a: {b: 1, _override_: maybe}\n", r"_override_ must be true or false"),
    ],
)
def test_what_cannot_be_meant_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(text, "x.yaml")


def test_the_override_mark_is_taken_out() -> None:
    section = _section("a:\n  _override_: true\n  b: 1\n")
    inner = section.children["a"]
    assert isinstance(inner, Section)
    assert inner.replaces
    assert list(inner.children) == ["b"]


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory() -> None:
    levels = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 10))
    with pytest.raises(ConfigError, match=r"x.yaml:\d+: more than \d+ values, aliases expanded"):
        read_yaml(f"x0: &x0 [1, 2]\n{levels}", "x.yaml")
    sections = "".join(f"x{i}: &x{i} {{{', '.join(f'k{j}: *x{i - 1}' for j in range(9))}}}\n" for i in range(1, 10))
    with pytest.raises(ConfigError, match="aliases expanded"):
        read_yaml(f"x0: &x0 {{a: 1}}\n{sections}", "x.yaml")


def test_endless_nesting_is_an_error_of_the_file() -> None:
    with pytest.raises(ConfigError, match="x.yaml: nested too deeply"):
        read_yaml("a: " + "[" * 20000 + "]" * 20000, "x.yaml")
