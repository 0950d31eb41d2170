"""ReasoningGymEnvironment: scores with the reasoning-gym task that made the prompt, in a scoring process.

The answer is what stands in the last <answer> tags of the completion, or else the whole text.
"""

import asyncio

from rl.core.types import Completion, FinishReason, Prompt, RolloutStatus
from rl.environments.base import StepResult
from rl.environments.config import ReasoningGymEnvConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import OutcomeKind, ScorerPool
from rl.environments.reasoning_gym_scorer import prepare_reasoning_gym, score_entry

_RECIPE = "reasoning_gym"


class ReasoningGymEnvironment:
    """Scores with the task's own function in its own processes."""

    def __init__(self, name: str, config: ReasoningGymEnvConfig) -> None:
        """Start the scoring processes in the background."""
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare_reasoning_gym)

    async def step(self, prompt: Prompt, completions: list[Completion]) -> list[StepResult]:
        """Score all siblings; one result each, in order."""
        await self._pool.ready()
        return list(await asyncio.gather(*(self._score(prompt, completion) for completion in completions)))

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        await self._pool.close()

    async def _score(self, prompt: Prompt, completion: Completion) -> StepResult:
        recipe = prompt.metadata.get(_RECIPE)
        if recipe is None:
            detail = f"prompt {prompt.prompt_id} was made by no reasoning-gym task; use a dataset of kind reasoning_gym"
            return failed(RolloutStatus.REWARD_ERROR, detail)
        outcome = await self._pool.run(score_entry, dict(recipe), completion.text)
        if outcome.kind is not OutcomeKind.OK:
            return failed_task(outcome, f"scoring prompt {prompt.prompt_id}")
        ended = completion.finish_reason is FinishReason.STOP
        return StepResult(messages=(), reward=outcome.value, done=True, metrics={"properly_ended": float(ended)})
