"""MathEnvironment: one completion, one answer; 1 when it equals the reference answer, else 0.

A completion that cannot be judged (late, process died, unreadable reference) has a failed status and no reward.
"""

import asyncio

from rl.core.types import Completion, FinishReason, Prompt, RolloutStatus
from rl.environments.answers import Judgement, judge_answer, judge_literal_answer, prepare_math
from rl.environments.base import StepResult
from rl.environments.config import MathEnvConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import OutcomeKind, ScorerPool

_ANSWER = "answer"


class MathEnvironment:
    """Scores with math-verify in its own processes."""

    def __init__(self, name: str, config: MathEnvConfig) -> None:
        """Start the scoring processes in the background."""
        self._config = config
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare_math)

    async def step(self, prompt: Prompt, completions: list[Completion]) -> list[StepResult]:
        """Score all siblings; one result each, in order."""
        await self._pool.ready()
        return list(await asyncio.gather(*(self._score(prompt, completion) for completion in completions)))

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        await self._pool.close()

    async def _score(self, prompt: Prompt, completion: Completion) -> StepResult:
        ended = completion.finish_reason is FinishReason.STOP
        reference = prompt.metadata.get(_ANSWER)
        if reference is None:
            return failed(
                RolloutStatus.REWARD_ERROR, f"prompt {prompt.prompt_id} has no reference answer; set answer_key"
            )
        if self._config.literal_answer and not ended:
            return _scored(Judgement(False), ended)
        judge = judge_literal_answer if self._config.literal_answer else judge_answer
        outcome = await self._pool.run(judge, completion.text, str(reference))
        if outcome.kind is not OutcomeKind.OK:
            return failed_task(outcome, f"scoring prompt {prompt.prompt_id}")
        return _scored(outcome.value, ended)


def _scored(judgement: Judgement, ended: bool) -> StepResult:
    if judgement.fault:
        return failed(RolloutStatus.REWARD_ERROR, judgement.fault)
    reward = float(judgement.is_correct)
    return StepResult(
        messages=(), reward=reward, done=True, metrics={"accuracy": reward, "properly_ended": float(ended)}
    )
