import math
import os

import pytest
from pydantic import ValidationError

from rl.core.types import FinishReason, RolloutStatus, Turn
from rl.environments.base import Episode
from rl.environments.code import CodeEnvironment, find_code, read_tests
from rl.environments.code_tests import AssertTest, InputOutputTest
from rl.environments.config import CodeEnvConfig, SandboxLimits
from rl.environments.single_turn import Unscorable
from tests.support.completions import completion, episodes, text_prompt
from tests.support.waiting import wait_for_exit

TESTS = {"tests": [{"stdin": "1 2", "stdout": "3"}, {"stdin": "2 3", "stdout": "5"}]}
RIGHT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
HALF = "```python\nprint(3)\n```"
ENDLESS = "```python\nwhile True: pass\n```"
CRASH = "```python\n1/0\n```"


def config(**values):
    return CodeEnvConfig(kind="code", limits=SandboxLimits(wall_s=1.0), **values)


async def step(settings, texts, metadata=TESTS):
    environment = CodeEnvironment("code", settings)
    try:
        return await environment.step(text_prompt(metadata=metadata), episodes([completion(text) for text in texts]))
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("no program", ("", ""), None),
        ("```python\nx = 1\n```", ("", ""), "x = 1\n"),
        ("```\nx = 1\n```\ntext\n```py\ny = 2\n```\nend", ("", ""), "y = 2\n"),
        ("```json\n{}\n```", ("", ""), None),
        ("```python\nnever closed", ("", ""), None),
        ("<code>x</code> <code>\ny</code>", ("<code>", "</code>"), "\ny"),
        ("<code>x</code> <code>y", ("<code>", "</code>"), "x"),
        ("x</code>", ("<code>", "</code>"), None),
    ],
)
def test_the_last_program_is_found(text, tags, expected):
    assert find_code(text, *tags) == expected


def test_tests_are_pairs_or_assert_code():
    pairs = read_tests({"tests": [{"stdin": "1", "stdout": "2"}, "assert f(1)"]})
    assert pairs == (InputOutputTest("1", "2"), AssertTest("assert f(1)"))
    assert read_tests({"tests": "assert f(1)"}) == (AssertTest("assert f(1)"),)


@pytest.mark.parametrize("tests", [None, [], "", [" "], [{"stdin": "1"}], [{"stdin": 1, "stdout": "1"}], [3], {"a": 1}])
def test_a_row_without_proper_tests_cannot_be_scored(tests):
    with pytest.raises(Unscorable, match="tests"):
        read_tests({"tests": tests})


async def test_all_tests_must_pass_and_what_a_program_does_is_no_failed_sample():
    results = await step(config(), [RIGHT, HALF, ENDLESS, CRASH, "no program"])
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert all(result.status is RolloutStatus.OK and result.done for result in results)
    assert [result.metrics["timed_out"] for result in results] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert [result.metrics["has_code"] for result in results] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert "tests_passed" not in results[0].metrics


async def test_the_reward_can_be_the_share_of_tests():
    results = await step(config(reward="share", num_workers=2), [RIGHT, HALF, CRASH])
    assert [result.reward for result in results] == [1.0, 0.5, 0.0]
    assert [result.metrics["accuracy"] for result in results] == [1.0, 0.0, 0.0]


async def test_a_row_without_tests_is_a_failed_sample():
    (result,) = await step(config(), [RIGHT], metadata={})
    assert result.status is RolloutStatus.REWARD_ERROR and math.isnan(result.reward)
    assert "prompt p0: the row has no tests" in result.detail


async def test_a_failure_is_answered_until_the_attempts_are_used_up():
    environment = CodeEnvironment("code", config(max_attempts=2, max_feedback_chars=80))
    prompt = text_prompt(metadata=TESTS)
    cut = completion(CRASH, FinishReason.LENGTH)
    first, unfinished = await environment.step(prompt, episodes([completion(CRASH), cut]))
    assert not first.done and first.reward == 0.0 and first.metrics["attempts"] == 1.0
    assert unfinished.done
    (message,) = first.messages
    assert message.role == "user" and message.content.endswith("ZeroDivisionError: division by zero")
    assert message.content.startswith("With this input:\n1 2\n") and len(message.content) == 80 + len("\n...\n")
    earlier = (Turn((1,), completion(CRASH), first.messages),)
    again, right = await environment.step(
        prompt, [Episode(0, earlier, completion(CRASH)), Episode(1, earlier, completion(RIGHT))]
    )
    assert again.done and again.reward == 0.0 and again.messages == ()
    assert right.done and right.reward == 1.0 and right.metrics["attempts"] == 2.0
    await environment.close()


async def test_closing_ends_the_programs_that_run():
    environment = CodeEnvironment("code", config())
    await environment._pool.ready()
    pids = environment._pool.worker_pids()
    await environment.close()
    wait_for_exit(pids)
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("values", "words"),
    [({"open_tag": "<code>"}, "set together"), ({"timeout_s": 0.5}, "exceeds timeout_s")],
)
def test_settings_that_cannot_work_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        config(**values)


def test_only_several_attempts_need_several_turns():
    assert not config().is_multi_turn and config(max_attempts=2).is_multi_turn
