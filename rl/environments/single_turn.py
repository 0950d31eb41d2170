"""SingleTurnEnvironment: one completion, one score, computed in a scoring process. What is scored is the subclass's.

A completion that cannot be scored (late, process died, prompt without what the scorer needs) has a failed status and
no reward.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rl.core.types import Completion, FinishReason, Prompt, RolloutStatus
from rl.environments.base import Episode, StepResult
from rl.environments.completion_form import thinking_flags
from rl.environments.config import ScorerPoolConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import OutcomeKind, ScorerPool

# A function of a module and its arguments, for a scoring process.
Task = tuple[Callable[..., Any], tuple[Any, ...]]


class Unscorable(Exception):
    """A completion for which there is no reward; the message says why."""


class SingleTurnEnvironment(ABC):
    """Scores each completion by itself in processes of its own."""

    def __init__(self, name: str, config: ScorerPoolConfig, prepare: Callable[[], None], *, think_tags: bool) -> None:
        """Start the scoring processes in the background; each calls `prepare` first.

        Args:
            name: For messages.
            config: Processes and deadline.
            prepare: Imports what the scoring needs.
            think_tags: Flag completions whose <think> tags are not balanced.
        """
        self._think_tags = think_tags
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare)

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Score all siblings; one result each, in order."""
        await self._pool.ready()
        return list(await asyncio.gather(*(self._score(prompt, episode.completion) for episode in episodes)))

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        await self._pool.close()

    @abstractmethod
    def task(self, prompt: Prompt, completion: Completion) -> Task | float:
        """Return what a scoring process computes, or the reward where nothing needs to be computed.

        Raises:
            Unscorable: the prompt lacks what the scorer needs.
        """

    @abstractmethod
    def reward(self, value: Any) -> float:
        """Return the reward for what the task returned.

        Raises:
            Unscorable: the value is none.
        """

    def metrics(self, reward: float) -> dict[str, float]:
        """Return the numbers to report beside `properly_ended`."""
        return {}

    async def _score(self, prompt: Prompt, completion: Completion) -> StepResult:
        try:
            task = self.task(prompt, completion)
            if isinstance(task, float):
                return self._scored(task, completion)
            function, arguments = task
            outcome = await self._pool.run(function, *arguments)
            if outcome.kind is not OutcomeKind.OK:
                return failed_task(outcome, f"scoring prompt {prompt.prompt_id}")
            return self._scored(self.reward(outcome.value), completion)
        except Unscorable as error:
            return failed(RolloutStatus.REWARD_ERROR, str(error))

    def _scored(self, reward: float, completion: Completion) -> StepResult:
        ended = float(completion.finish_reason is FinishReason.STOP)
        metrics = self.metrics(reward) | {"properly_ended": ended}
        flags = thinking_flags(completion.text, self._think_tags)
        return StepResult(messages=(), reward=reward, done=True, metrics=metrics, flags=flags)
