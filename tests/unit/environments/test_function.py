import math
import os

import pytest

from rl.core.errors import ConfigError
from rl.core.types import RolloutStatus, TurnFlag
from rl.environments.base import Episode
from rl.environments.config import FunctionEnvConfig
from rl.environments.function import FunctionEnvironment
from tests.support import reward_functions
from tests.support.completions import completion, episodes, text_prompt

MODULE = reward_functions.__name__
PROMPT = text_prompt("1+1=", {"answer": "2", "level": 3})
TEXTS = ["2", "3", "22", "2"]


async def score(name, texts=TEXTS, timeout_s=30.0):
    environment = FunctionEnvironment(
        "mine", FunctionEnvConfig(kind="function", target=f"{MODULE}:{name}", timeout_s=timeout_s)
    )
    try:
        return await environment.step(PROMPT, episodes([completion(text) for text in texts]))
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("right_answer", [1.0, 0.0, 0.0, 1.0]),
        ("all_columns", [1.0] * 4),
        ("lengths", [1.0, 1.0, 2.0, 1.0]),
        ("callable_object", [1.0] * 4),
        ("partial", [0.25] * 4),
        ("numbers_of_many_types", [1.0, 1.0, 0.5, 0.0]),
        ("as_array", [1.0] * 4),
    ],
)
async def test_good_functions_give_their_rewards(name, rewards):
    results = await score(name)
    assert [result.reward for result in results] == rewards
    assert {result.status for result in results} == {RolloutStatus.OK}


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("raises", RolloutStatus.REWARD_ERROR, "KeyError: 'oops'"),
        ("exits", RolloutStatus.REWARD_ERROR, "SystemExit: 3"),
        ("dies", RolloutStatus.REWARD_ERROR, "exit code 7"),
        ("needs_gold", RolloutStatus.REWARD_ERROR, "needs the column(s) gold"),
        ("returns_none", RolloutStatus.REWARD_INVALID, "returned None, expected a list of 4 rewards"),
        ("returns_one_number", RolloutStatus.REWARD_INVALID, "returned 1.0 of type float"),
        ("too_few", RolloutStatus.REWARD_INVALID, "returned 3 rewards for 4 completions"),
    ],
)
async def test_a_function_that_fails_fails_all_samples_and_says_where(name, status, words):
    results = await score(name)
    assert {result.status for result in results} == {status}
    for index, result in enumerate(results):
        assert math.isnan(result.reward) and words in result.detail
        assert f"{MODULE}:{name}, prompt p0, sample {index}" in result.detail


async def test_a_function_that_hangs_times_out_and_the_next_group_is_scored():
    config = FunctionEnvConfig(kind="function", target=f"{MODULE}:hangs", timeout_s=0.3)
    environment = FunctionEnvironment("mine", config)
    for _ in range(2):
        results = await environment.step(PROMPT, episodes([completion(text) for text in TEXTS]))
        assert [result.status for result in results] == [RolloutStatus.REWARD_TIMEOUT] * 4
    await environment.close()


async def test_a_bad_value_fails_only_its_own_sample():
    results = await score("one_bad_sample_each", ["a"] * 6)
    assert [result.status for result in results] == [RolloutStatus.OK] + [RolloutStatus.REWARD_INVALID] * 5
    assert results[0].reward == 0.5
    assert "sample 1: returned None of type NoneType" in results[1].detail
    assert "returned nan" in results[2].detail and "returned inf" in results[3].detail


async def test_rewards_out_of_range_and_components_that_cannot_be_logged_are_no_rewards():
    results = await score("unusable_rewards", ["a"] * 5)
    assert {result.status for result in results} == {RolloutStatus.REWARD_INVALID}
    details = "\n".join(result.detail for result in results)
    for words in ("returned 1e+19, beyond 1e+18", "component whose name is empty", "cannot be printed", "at most 64"):
        assert words in details
    assert "the weighted sum of the components returned 2e+18, beyond 1e+18" in details


@pytest.mark.parametrize("name", ["absent", "not_callable"])
async def test_a_target_that_is_no_function_is_a_configuration_error(name):
    with pytest.raises(ConfigError, match=name):
        await score(name)


async def test_the_function_runs_in_another_process_once_per_group():
    results = await score("where_it_runs")
    assert len({result.reward for result in results}) == 1 and results[0].reward != os.getpid()


async def test_a_module_beside_the_command_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_local_rewards.py").write_text("def score(completions):\n    return [0.75] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    environment = FunctionEnvironment("mine", FunctionEnvConfig(kind="function", target="my_local_rewards:score"))
    (result,) = await environment.step(PROMPT, episodes([completion("x")]))
    assert result.reward == 0.75
    await environment.close()


async def score_components(texts=TEXTS, **settings):
    config = FunctionEnvConfig(kind="function", timeout_s=30, **settings)
    environment = FunctionEnvironment("mine", config)
    try:
        return await environment.step(PROMPT, episodes([completion(text) for text in texts]))
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("settings", "reward", "components"),
    [
        ({"target": "two_components"}, 1.0, {"correctness": 1.0, "format": 0.0}),
        (
            {"target": "two_components", "weights": {"correctness": 0.7, "format": 0.3}},
            0.7,
            {"correctness": 1.0, "format": 0.0},
        ),
        ({"targets": {"a": "ones", "b": "zeros"}, "weights": {"a": 0.7, "b": 0.3}}, 0.7, {"a": 1.0, "b": 0.0}),
        ({"targets": {"a": "ones", "b": "partial"}}, 1.25, {"a": 1.0, "b": 0.25}),
        ({"target": "ones"}, 1.0, {}),
    ],
)
async def test_components_are_weighed_and_reported(settings, reward, components):
    results = await score_components(**in_module(settings))
    assert {result.reward for result in results} == {reward}
    assert all(result.components == components and result.status is RolloutStatus.OK for result in results)


@pytest.mark.parametrize("weights", [{}, {"correctness": 1.0, "format": 1.0}])
async def test_a_sample_that_lacks_a_component_is_unscored_by_name(weights):
    settings = in_module({"target": "faulty_components", "weights": weights})
    good, *bad = await score_components(["a"] * 6, **settings)
    # Without weights the component that one sample has is missing in all others.
    assert (good.status is RolloutStatus.OK) == bool(weights)
    assert [result.status for result in bad if result.status is not RolloutStatus.OK] == [
        RolloutStatus.REWARD_INVALID
    ] * (5 if weights else 4)
    for index, words in ((1, "'format'"), (2, "'correctness'"), (3, "'correctness'"), (5, "the number 1.0")):
        assert f"{MODULE}:faulty_components, prompt p0, sample {index}: " in bad[index - 1].detail
        assert words in bad[index - 1].detail


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"target": "no_component"}, RolloutStatus.REWARD_INVALID, "a mapping without components"),
        ({"target": "ones", "weights": {"a": 1.0}}, RolloutStatus.REWARD_INVALID, "the number 1.0, expected the"),
        ({"targets": {"a": "ones", "b": "raises"}}, RolloutStatus.REWARD_ERROR, "reward_functions:raises, prompt p0"),
        ({"targets": {"a": "ones", "b": "too_few"}}, RolloutStatus.REWARD_INVALID, "'b': returned 3 rewards for 4"),
        ({"targets": {"a": "two_components"}}, RolloutStatus.REWARD_INVALID, "'a': returned a mapping"),
    ],
)
async def test_a_component_that_fails_fails_the_group(settings, status, words):
    results = await score_components(**in_module(settings))
    assert {result.status for result in results} == {status}
    assert all(words in result.detail for result in results)


async def test_a_sample_keeps_its_number_and_malformed_thinking_is_flagged():
    config = FunctionEnvConfig(kind="function", target=f"{MODULE}:one_bad_sample_each", think_tags=True)
    environment = FunctionEnvironment("mine", config)
    later = [Episode(sample, (), completion("<think>")) for sample in (1, 3, 4, 6, 7, 9)]
    good, bad, *_ = await environment.step(PROMPT, later)
    assert good.flags == {TurnFlag.MALFORMED_THINKING} and "sample 3: returned None" in bad.detail
    await environment.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "either target .* or targets"),
        ({"target": "a:b", "targets": {"x": "a:b"}}, "either target .* or targets"),
        ({"targets": {"x": "a:b"}, "weights": {"y": 1.0}}, "weights names y and targets x"),
        ({"targets": {" ": "a:b"}}, "a reward component's name is empty"),
        ({"target": "a:b", "weights": {"x\n": 1.0}}, "characters that cannot be printed"),
        ({"target": "a:b", "weights": {"x": float("nan")}}, "weights.x"),
        ({"target": "a:b", "weights": {"x": 1e9}}, "weights.x"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        FunctionEnvConfig(kind="function", **settings)


def in_module(settings):
    """Name the functions of the settings by the module of the tests."""
    full = dict(settings)
    if "target" in full:
        full["target"] = f"{MODULE}:{full['target']}"
    if "targets" in full:
        full["targets"] = {name: f"{MODULE}:{target}" for name, target in full["targets"].items()}
    return full
