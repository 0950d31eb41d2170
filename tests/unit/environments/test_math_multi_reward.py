import pytest

from rl.core.types import FinishReason, RolloutStatus, TurnFlag
from rl.environments.config import MathMultiRewardEnvConfig
from rl.environments.math_multi_reward import MathMultiRewardEnvironment
from tests.support.completions import completion, episodes, text_prompt

PROMPT = text_prompt(metadata={"answer": "8"})


async def step(completions, prompt=PROMPT, **settings):
    config = MathMultiRewardEnvConfig(kind="math_multi_reward", **settings)
    return await MathMultiRewardEnvironment("math", config).step(prompt, episodes(completions))


@pytest.mark.parametrize(
    ("text", "components"),
    [
        ("<think>3+5</think>\n<answer> 8 </answer>", (1, 1, 1)),
        ("<think>3+5</think><answer>7</answer>", (0, 1, 1)),
        ("<think>3+5</think><answer>eight</answer>", (0, 0, 1)),
        ("<answer>8</answer>", (1, 1, 0)),
        ("<think>a</think><answer>7</answer><answer>8</answer>", (1, 1, 0)),
        ("<think>a</think><think>b</think><answer>8</answer>", (1, 1, 0)),
        ("so: <think>a</think><answer>8</answer>", (1, 1, 0)),
        ("8", (0, 0, 0)),
        ("<think>a</think><answer></answer>", (0, 0, 1)),
    ],
)
async def test_answers_in_tags(text, components):
    (result,) = await step([completion(text)])
    assert tuple(result.components.values()) == components
    assert list(result.components) == ["correctness", "integer", "format"]
    assert result.reward == sum(components) and result.done and result.metrics["accuracy"] == components[0]


@pytest.mark.parametrize(
    ("text", "finish", "components"),
    [
        ("8\n", FinishReason.STOP, (1, 1, 1)),
        ("8", FinishReason.LENGTH, (1, 1, 0)),
        ("-7", FinishReason.STOP, (0, 1, 1)),
        ("8 ok", FinishReason.STOP, (0, 0, 0)),
        ("8.0", FinishReason.STOP, (0, 0, 1)),
        ("", FinishReason.STOP, (0, 0, 0)),
    ],
)
async def test_answers_that_stand_alone(text, finish, components):
    (result,) = await step([completion(text, finish)], answer_form="line")
    assert tuple(result.components.values()) == components


async def test_weights_think_tags_and_a_prompt_without_an_answer():
    (result,) = await step([completion("<think>8")], answer_form="line", think_tags=True)
    assert result.flags == {TurnFlag.MALFORMED_THINKING}
    (result,) = await step([completion("8")], answer_form="line", weights={"integer": 0.25, "format": 0.0})
    assert result.reward == 1.25
    (result,) = await step([completion("8")], text_prompt())
    assert result.status is RolloutStatus.REWARD_ERROR and "no reference answer" in result.detail
