import asyncio

import pytest

from rl.core.types import Prompt, RolloutStatus
from rl.data.config import ReasoningGymDataset
from rl.data.datasets import load_rows
from rl.environments.config import ReasoningGymEnvConfig
from rl.environments.reasoning_gym import ReasoningGymEnvironment
from tests.support.completions import completion, episodes, text_prompt


@pytest.fixture(scope="module")
def environment():
    environment = ReasoningGymEnvironment("gym", ReasoningGymEnvConfig(kind="reasoning_gym", timeout_s=30))
    yield environment
    asyncio.run(environment.close())


async def test_the_task_scores_its_own_entries():
    rows = load_rows(ReasoningGymDataset(kind="reasoning_gym", task="leg_counting", size=3, seed=5))
    environment = ReasoningGymEnvironment("gym", ReasoningGymEnvConfig(kind="reasoning_gym", timeout_s=30))
    for row in rows:
        answer = row.metadata["answer"]
        prompt = Prompt(row.row_id, row.messages, "gym", row.metadata, (1,))
        texts = [f"I count <answer>{answer}</answer>", answer, "<answer>-1</answer>"]
        results = await environment.step(prompt, episodes([completion(text) for text in texts]))
        assert [result.reward for result in results] == [1.0, 1.0, 0.0]
    (result,) = await environment.step(text_prompt(metadata={"answer": "1"}), episodes([completion("1")]))
    assert result.status is RolloutStatus.REWARD_ERROR and "no reasoning-gym task" in result.detail
    await environment.close()


@pytest.mark.parametrize(
    "task",
    [
        "basic_arithmetic",
        "chain_sum",
        "gcd",
        "base_conversion",
        "letter_counting",
        "number_sorting",
        "word_sorting",
        "prime_factorization",
        "simple_equations",
        "caesar_cipher",
    ],
)
async def test_a_task_of_any_kind_scores_its_answers(task, environment):
    for row in load_rows(ReasoningGymDataset(kind="reasoning_gym", task=task, size=2, seed=1)):
        prompt = Prompt(row.row_id, row.messages, "gym", row.metadata, (1,))
        texts = [f"<answer>{row.metadata['answer']}</answer>", "<answer>no idea at all</answer>", ""]
        results = await environment.step(prompt, episodes([completion(text) for text in texts]))
        assert {result.status for result in results} == {RolloutStatus.OK}
        assert results[0].reward == 1.0 and max(result.reward for result in results[1:]) < 0.5


async def test_a_recipe_that_is_broken_fails_its_sample_and_the_next_is_scored(environment):
    broken = text_prompt(metadata={"reasoning_gym": {"task": "nope", "size": 1, "seed": 0, "kwargs": {}, "index": 0}})
    (result,) = await environment.step(broken, episodes([completion("1")]))
    assert result.status is RolloutStatus.REWARD_ERROR and "nope" in result.detail
