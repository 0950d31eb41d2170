from rl.core.types import Prompt, RolloutStatus
from rl.data.config import ReasoningGymDataset
from rl.data.datasets import load_rows
from rl.environments.config import ReasoningGymEnvConfig
from rl.environments.reasoning_gym import ReasoningGymEnvironment
from tests.support.completions import completion, episodes, text_prompt


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
