import pytest

from rl.core.errors import ConfigError
from rl.core.imports import import_object
from rl.environments.config import FunctionEnvConfig, MathEnvConfig, ReasoningGymEnvConfig, ToolsEnvConfig
from rl.environments.math import MathEnvironment
from rl.environments.reasoning_gym import ReasoningGymEnvironment
from rl.environments.registry import build_environments, check_environments
from tests.support import reward_functions

MODULE = reward_functions.__name__


def function(target):
    return {"mine": FunctionEnvConfig(kind="function", target=target)}


async def test_every_named_environment_is_built():
    environments = build_environments({"math": MathEnvConfig(), "gym": ReasoningGymEnvConfig(kind="reasoning_gym")})
    assert isinstance(environments["math"], MathEnvironment)
    assert isinstance(environments["gym"], ReasoningGymEnvironment)
    for environment in environments.values():
        await environment.close()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (MODULE, "not of the form module:function"),
        ("no_such_module_here:score", "no module 'no_such_module_here'"),
        (f"{MODULE}:scor", "defines no 'scor'"),
    ],
)
def test_a_reward_function_that_cannot_be_found_is_reported_before_anything_starts(target, words):
    with pytest.raises(ConfigError, match=words):
        check_environments(function(target))


def test_a_reward_module_is_checked_without_running_it(tmp_path, monkeypatch):
    (tmp_path / "loud_rewards.py").write_text("open('it_ran', 'w')\ndef score(completions): ...\n")
    monkeypatch.chdir(tmp_path)
    check_environments(function("loud_rewards:score"))
    assert not (tmp_path / "it_ran").exists()
    (tmp_path / "broken_rewards.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match="broken_rewards.py:1"):
        check_environments(function("broken_rewards:score"))


@pytest.mark.parametrize("target", [f"{MODULE}:partial", "os.path:join", "math:sqrt"])
def test_anything_that_a_module_can_offer_is_accepted_and_can_be_called(target):
    check_environments(function(target))
    assert callable(import_object(target))


def test_the_package_of_a_reward_module_is_not_run_either(tmp_path, monkeypatch):
    (tmp_path / "loud_package").mkdir()
    (tmp_path / "loud_package" / "__init__.py").write_text("raise RuntimeError('it ran')\n")
    (tmp_path / "loud_package" / "rewards.py").write_text("try:\n    score = print\nfinally:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    check_environments(function("loud_package.rewards:score"))
    with pytest.raises(ConfigError, match="'loud_package.rewards' defines no 'scor'; it defines score"):
        check_environments(function("loud_package.rewards:scor"))
    with pytest.raises(ConfigError, match="no module 'loud_package.prizes'"):
        check_environments(function("loud_package.prizes:score"))


def test_names_that_a_star_brings_are_accepted(tmp_path, monkeypatch):
    (tmp_path / "starry_rewards.py").write_text("from os.path import *\n")
    monkeypatch.chdir(tmp_path)
    check_environments(function("starry_rewards:join"))


def test_functions_of_components_and_tools_are_looked_for_too():
    known = f"{MODULE}:right_answer"
    tools = {"calculator": {"kind": "calculator"}, "mine": {"kind": "function", "target": known}}
    scorer = {"kind": "function", "targets": {"a": known}}
    check_environments({"tools": ToolsEnvConfig(kind="tools", tools=tools, scorer=scorer)})
    broken = f"{MODULE}:scor"
    for environment, key in (
        (FunctionEnvConfig(kind="function", targets={"a": known, "b": broken}), "env.mine.targets.b"),
        (ToolsEnvConfig(kind="tools", tools=tools | {"x": {"kind": "function", "target": broken}}), "env.mine.tools.x"),
        (ToolsEnvConfig(kind="tools", tools=tools, scorer=scorer | {"targets": {"a": broken}}), "env.mine.scorer"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}.*defines no 'scor'"):
            check_environments({"mine": environment})
