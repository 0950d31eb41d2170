"""FunctionEnvironment: the user's own reward function, called once per group in a scoring process.

    def score(prompts, completions, answer, **columns):     # lists with one entry per completion
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

`prompts` holds plain text, or lists of {role, content} in chat format. Every other column of the dataset row that the
function names (all of them with **kwargs) is passed as a list. It may be async, and may be any callable object of a
module. Whatever goes wrong in it fails the samples it concerns, and never counts as a zero.
"""

from collections.abc import Sequence

from rl.core.types import Completion, FinishReason, Message, Prompt, RolloutStatus
from rl.environments.base import Episode, StepResult
from rl.environments.config import FunctionEnvConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import OutcomeKind, ScorerPool
from rl.environments.reward_function import SampleReward, call_function, prepare_function

_PLAIN_TEXT = "text"


class FunctionEnvironment:
    """Scores with a user's function in its own processes."""

    def __init__(self, name: str, config: FunctionEnvConfig) -> None:
        """Start the scoring processes in the background; they import the function."""
        self._target = config.target
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare_function, (config.target,))

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Score all siblings by one call; one result each, in order.

        Raises:
            ConfigError: the function cannot be imported.
        """
        await self._pool.ready()
        completions = [episode.completion for episode in episodes]
        texts = [completion.text for completion in completions]
        outcome = await self._pool.run(
            call_function, self._target, _plain(prompt.messages), texts, dict(prompt.metadata)
        )
        if outcome.kind is not OutcomeKind.OK:
            return [failed_task(outcome, self._subject(prompt, index)) for index in range(len(completions))]
        return [
            self._result(reward, completion, self._subject(prompt, index))
            for index, (reward, completion) in enumerate(zip(outcome.value, completions, strict=True))
        ]

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        await self._pool.close()

    def _subject(self, prompt: Prompt, index: int) -> str:
        return f"{self._target}, prompt {prompt.prompt_id}, sample {index}"

    def _result(self, reward: SampleReward, completion: Completion, subject: str) -> StepResult:
        if isinstance(reward, str):
            return failed(RolloutStatus.REWARD_INVALID, f"{subject}: {reward}")
        ended = completion.finish_reason is FinishReason.STOP
        return StepResult(messages=(), reward=reward, done=True, metrics={"properly_ended": float(ended)})


def _plain(messages: Sequence[Message]) -> str | list[dict[str, str]]:
    if len(messages) == 1 and messages[0].role == _PLAIN_TEXT:
        return messages[0].content
    return [{"role": message.role, "content": message.content} for message in messages]
