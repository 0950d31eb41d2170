import asyncio
import json
import math

import pytest

from rl.core.errors import ConfigError
from rl.core.types import FinishReason, RolloutStatus, TurnFlag
from rl.environments.base import Episode
from rl.environments.config import (
    CalculatorToolConfig,
    FunctionEnvConfig,
    FunctionToolConfig,
    MathEnvConfig,
    MathMultiRewardEnvConfig,
    ToolsEnvConfig,
)
from rl.environments.tools import ToolsEnvironment
from tests.support import reward_functions, tools
from tests.support.completions import completion, episodes, text_prompt

PROMPT = text_prompt("Q: 37*48\n", {"answer": "1776"})
TOOLS = {"calculator": CalculatorToolConfig(kind="calculator")} | {
    name: FunctionToolConfig(kind="function", target=f"{tools.__name__}:{name}")
    for name in ("greet", "hangs", "fails", "speaks_long")
}
SETTINGS = {"kind": "tools", "tools": TOOLS, "scorer": MathEnvConfig(literal_answer=True), "timeout_s": 5.0}


def call(tool="calculator", /, **arguments):
    body = json.dumps({"name": tool, "arguments": arguments or {"expression": "37*48"}})
    return f"<tool_call>{body}</tool_call>"


@pytest.fixture(scope="module")
def environment():
    environment = ToolsEnvironment("tools", ToolsEnvConfig(**SETTINGS, num_workers=2))
    yield environment
    asyncio.run(environment.close())


async def play(environment, texts, prompt=PROMPT):
    """Return the results of one rollout with these completions, until it is done."""
    results, state = [], None
    for text in texts:
        (result,) = await environment.step(prompt, [Episode(0, (), completion(text), state)])
        results.append(result)
        state = result.state
        if result.done:
            break
    return results


async def test_a_call_is_answered_and_the_final_answer_is_scored(environment):
    first, second = await play(environment, [call(), "1776\n"])
    assert [(message.role, message.content) for message in first.messages] == [("tool", "1776")]
    assert (first.done, first.reward, first.flags) == (False, 0.0, frozenset())
    assert (second.done, second.reward, second.messages, second.status) == (True, 1.0, (), RolloutStatus.OK)
    assert second.metrics == {
        "accuracy": 1.0,
        "properly_ended": 1.0,
        "tool_calls": 1.0,
        "invalid_tool_calls": 0.0,
        "failed_tool_calls": 0.0,
    }
    (wrong,) = await play(environment, ["1777"])
    assert wrong.done and wrong.reward == 0.0 and wrong.metrics["tool_calls"] == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>{"nam": 1</tool_call>', "error: the call is not valid JSON"),
        ('<tool_call>{"nam": 1', "error: the call is not valid JSON"),
        (call("abacus"), "error: there is no tool 'abacus', only calculator, greet"),
        ('<tool_call>{"name": "calculator", "arguments": "37*48"}</tool_call>', "error: the arguments must be a JSON"),
        (call(expression=37), "error: calculator: argument 'expression' must be text"),
        (call(formula="37*48"), "error: calculator: unknown argument 'formula'"),
    ],
)
async def test_a_malformed_call_is_answered_flagged_and_counted(environment, text, words):
    bad, good, final = await play(environment, [text, call(), "1776"])
    assert len(bad.messages) == 1 and bad.messages[0].content.startswith(words)
    assert bad.flags == {TurnFlag.INVALID_TOOL_CALL} and not bad.done and good.flags == frozenset()
    assert (final.reward, final.metrics["invalid_tool_calls"], final.metrics["tool_calls"]) == (1.0, 1.0, 2.0)


async def test_a_tool_that_fails_is_told_and_is_no_invalid_call(environment):
    bomb, zero, error, final = await play(
        environment, [call(expression="9**9**9**9"), call(expression="1/0"), call("fails", text="oops"), "1776"]
    )
    assert "too large" in bomb.messages[0].content and "division by zero" in zero.messages[0].content
    assert "KeyError: 'oops'" in error.messages[0].content
    assert bomb.flags == zero.flags == error.flags == frozenset()
    assert (final.metrics["failed_tool_calls"], final.metrics["invalid_tool_calls"]) == (3.0, 0.0)


async def test_calls_beyond_the_bound_are_errors_in_one_turn_and_over_turns(environment):
    (many,) = await play(environment, [call() * 6])
    assert [message.content for message in many.messages[:4]] == ["1776"] * 4
    assert all("no more than 4 tool calls" in message.content for message in many.messages[4:])
    assert many.flags == {TurnFlag.INVALID_TOOL_CALL} and many.metrics["invalid_tool_calls"] == 2.0
    *_, last = await play(environment, [call()] * 5)
    assert "no more than 4 tool calls" in last.messages[0].content and not last.done


async def test_siblings_keep_their_order_and_their_counts(environment):
    texts = ["1776", call(), "5", call("abacus"), call("greet", name="Bo"), "1776"]
    results = await environment.step(PROMPT, episodes([completion(text) for text in texts]))
    assert [result.done for result in results] == [True, False, True, False, False, True]
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert results[4].messages[0].content == "hello Bo"
    assert [result.metrics["tool_calls"] for result in results] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert await environment.step(PROMPT, []) == []


async def test_a_completion_that_was_cut_off_ends_the_rollout(environment):
    cut = [Episode(0, (), completion(text, FinishReason.LENGTH)) for text in (call()[:20], call(), "1776")]
    for episode, flags in zip(cut, [{TurnFlag.INVALID_TOOL_CALL}] * 2 + [frozenset()], strict=True):
        (result,) = await environment.step(PROMPT, [episode])
        assert result.done and result.reward == 0.0 and result.flags == flags
        assert result.metrics["invalid_tool_calls"] == float(bool(flags))


async def test_results_are_cut_and_a_prompt_without_an_answer_is_an_error(environment):
    (long,) = await play(environment, ['<tool_call>{"name": "speaks_long"}</tool_call>'])
    (nothing,) = await play(environment, ["7"], text_prompt())
    assert nothing.status is RolloutStatus.REWARD_ERROR and math.isnan(nothing.reward)
    assert long.messages[0].content.endswith("(cut)") and len(long.messages[0].content) < 1100


async def test_a_tool_that_hangs_ends_at_its_deadline_and_the_next_call_is_answered():
    environment = ToolsEnvironment("tools", ToolsEnvConfig(**SETTINGS | {"timeout_s": 0.5}))
    late, good = await play(environment, ['<tool_call>{"name": "hangs"}</tool_call>', call()])
    assert late.messages[0].content == "error: hangs: no result within 0.5 s" and late.flags == frozenset()
    assert good.messages[0].content == "1776" and good.metrics["failed_tool_calls"] == 1.0
    await environment.close()


async def test_role_template_tags_and_prefix_are_as_configured():
    config = ToolsEnvConfig(
        **SETTINGS,
        call_open="[[",
        call_close="]]",
        result_role="user",
        result_template="<r>{result}</r>\n",
        answer_prefix="A:",
        max_result_chars=3,
    )
    environment = ToolsEnvironment("tools", config)
    body = call().removeprefix("<tool_call>").removesuffix("</tool_call>")
    first, second = await play(environment, [f"[[{body}]]", "A: 1776\n"])
    assert (first.messages[0].role, first.messages[0].content) == ("user", "<r>177 ... (cut)</r>\n")
    assert second.reward == 1.0
    results = await environment.step(PROMPT, episodes([completion("1776"), completion("A: 5 A: 1776")]))
    assert [result.reward for result in results] == [0.0, 1.0]
    await environment.close()


@pytest.mark.parametrize(
    ("scorer", "components"),
    [
        (
            MathMultiRewardEnvConfig(kind="math_multi_reward", answer_form="line", think_tags=True),
            {"correctness": 1.0, "integer": 1.0, "format": 1.0},
        ),
        (
            FunctionEnvConfig(
                kind="function", targets={"a": f"{reward_functions.__name__}:right_answer"}, think_tags=True
            ),
            {"a": 1.0},
        ),
    ],
)
async def test_components_and_think_flags_are_reported_in_every_turn(scorer, components):
    environment = ToolsEnvironment("tools", ToolsEnvConfig(**SETTINGS | {"scorer": scorer}))
    first, second = await play(environment, ["<think>" + call(), "1776"])
    assert first.components == dict.fromkeys(components, 0.0) and second.components == components
    assert first.flags == {TurnFlag.MALFORMED_THINKING} and second.flags == frozenset()
    await environment.close()


async def test_a_tool_that_cannot_be_imported_is_a_configuration_error():
    missing = FunctionToolConfig(kind="function", target="no_such_module_here:tool")
    environment = ToolsEnvironment("tools", ToolsEnvConfig(**SETTINGS | {"tools": {"mine": missing}}))
    with pytest.raises(ConfigError, match="no_such_module_here"):
        await environment.step(PROMPT, episodes([completion("1776")]))
    await environment.close()


async def test_bombs_of_the_model_end_at_their_deadlines_side_by_side():
    environment = ToolsEnvironment("tools", ToolsEnvConfig(**SETTINGS | {"timeout_s": 0.5}, num_workers=2))
    texts = ['<tool_call>{"name": "hangs"}</tool_call>', call()] * 3
    results = await asyncio.wait_for(environment.step(PROMPT, episodes([completion(text) for text in texts])), 60)
    assert [result.messages[0].content for result in results[1::2]] == ["1776"] * 3
    await environment.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": {}}, "at least 1 item"),
        ({"call_open": "##", "call_close": "##"}, "a call needs two different tags"),
        ({"result_template": "no place"}, "does not contain {result}"),
        ({"tools": {"python": {"kind": "python", "limits": {"wall_s": 5}}}}, "must be below timeout_s=5"),
    ],
)
def test_settings_without_effect_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ToolsEnvConfig(**SETTINGS | settings)
