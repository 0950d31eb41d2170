import pytest

from rl.core.errors import ConfigError
from rl.environments.toolbox import Tool, prepare_tools, use_tool
from tests.support import tools

MODULE = tools.__name__


def use(target, arguments, settings=None):
    return use_tool(Tool("mine", target if ":" in target else f"{MODULE}:{target}", settings or {}), arguments, 1000)


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        ("greet", {"name": "Bo"}, "hello Bo"),
        ("greet", {"name": "Bo", "times": 2, "loud": True}, "HELLO BO HELLO BO"),
        ("look_up", {"key": "a", "table": {"a": 1}}, '{"key": "a", "value": 1}'),
        ("look_up", {"key": "a", "table": None}, '{"key": "a", "value": null}'),
        ("count", {"numbers": [1, 2.5]}, "3.5"),
        ("double", {"number": 4}, "8"),
        ("anything", {"b": 1, "a": [2]}, '["a", "b"]'),
        ("gives_no_json", {}, "{2}"),
        ("speaks_long", {}, "x" * 1000),
        ("gives_half_a_pair", {}, "a?b"),
        ("rl.environments.calculator:calculate", {"expression": "37*48"}, "1776"),
    ],
)
def test_any_callable_is_a_tool(target, arguments, text):
    outcome = use(target, arguments)
    assert (outcome.text, outcome.is_valid, outcome.is_ok) == (text, True, True)


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("greet", {}, "mine: missing argument 'name'"),
        ("greet", {"name": "Bo", "time": 2}, "unknown argument 'time'; it takes name, times, loud"),
        ("greet", {"name": 3}, "argument 'name' must be text, not a whole number"),
        ("greet", {"name": "Bo", "times": "2"}, "argument 'times' must be a whole number, not text"),
        ("greet", {"name": "Bo", "times": True}, "argument 'times' must be a whole number, not true or false"),
        ("greet", {"name": "Bo", "times": 2.5}, "must be a whole number, not a number"),
        ("greet", {"name": "Bo", "loud": 1}, "must be true or false"),
        ("look_up", {"key": "a", "table": [1]}, "must be an object or null, not a list"),
        ("count", {"numbers": 3}, "must be a list"),
        ("rl.environments.calculator:calculate", {"expression": 42}, "must be text"),
        ("rl.environments.calculator:calculate", {"expression": {"a": 1}}, "must be text, not an object"),
    ],
)
def test_arguments_that_do_not_fit_are_an_invalid_call(target, arguments, words):
    outcome = use(target, arguments)
    assert words in outcome.text and not outcome.is_valid and not outcome.is_ok


def test_a_call_cannot_give_what_the_configuration_sets():
    assert use("greet", {"name": "Bo"}, {"times": 2}).text == "hello Bo hello Bo"
    assert "unknown argument 'times'" in use("greet", {"name": "Bo", "times": 9}, {"times": 2}).text
    assert "unknown argument 'x'" in use("anything", {"x": 1}, {"x": 2}).text


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("fails", {"text": "oops"}, "mine: KeyError: 'oops'"),
        ("rl.environments.calculator:calculate", {"expression": "1/0"}, "mine: division by zero"),
    ],
)
def test_a_tool_that_raises_is_a_failure_and_no_invalid_call(target, arguments, words):
    outcome = use(target, arguments)
    assert words in outcome.text and outcome.is_valid and not outcome.is_ok


def test_tools_are_looked_for_before_the_first_call():
    prepare_tools((f"{MODULE}:greet",), ())
    with pytest.raises(ConfigError, match="absent"):
        prepare_tools((f"{MODULE}:absent",), ())
    with pytest.raises(ConfigError, match="absent"):
        prepare_tools((), (f"{MODULE}:absent",))
