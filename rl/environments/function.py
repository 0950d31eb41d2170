"""FunctionEnvironment: the user's own reward function, called once per group in a scoring process.

    def score(prompts, completions, answer, **columns):     # lists with one entry per completion
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

`prompts` holds plain text, or lists of {role, content} in chat format. Every other column of the dataset row that the
function names (all of them with **kwargs) is passed as a list. It may be async, and may be any callable object of a
module. A reward is a number or {component: number}; `targets` names one function per component instead. See
`rl.environments.reward_components` for how components make a reward. Whatever goes wrong in a function fails the
samples it concerns, and never counts as a zero.
"""

import asyncio
from collections.abc import Sequence

from rl.core.types import Completion, FinishReason, Message, Prompt, RolloutStatus
from rl.data.columns import PLAIN_TEXT
from rl.environments.base import Episode, StepResult
from rl.environments.completion_form import thinking_flags
from rl.environments.config import FunctionEnvConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import Outcome, OutcomeKind, ScorerPool
from rl.environments.reward_components import Weighed, weigh_group
from rl.environments.reward_function import Fault, SampleValue, Value, call_function, prepare_functions


class FunctionEnvironment:
    """Scores with a user's functions in its own processes."""

    def __init__(self, name: str, config: FunctionEnvConfig) -> None:
        """Start the scoring processes in the background; they import the functions."""
        self._components = tuple(config.targets)
        self._targets = tuple(config.targets.values()) if config.target is None else (config.target,)
        self._weights = config.weights
        self._think_tags = config.think_tags
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare_functions, (self._targets,))

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Score all siblings by one call of each function; one result each, in order.

        Raises:
            ConfigError: a function cannot be imported.
        """
        await self._pool.ready()
        texts = [episode.completion.text for episode in episodes]
        arguments = (_plain(prompt.messages), texts, dict(prompt.metadata))
        outcomes = await asyncio.gather(
            *(self._pool.run(call_function, target, *arguments) for target in self._targets)
        )
        for target, outcome in zip(self._targets, outcomes, strict=True):
            if outcome.kind is not OutcomeKind.OK:
                return [failed_task(outcome, f"{target}, {_sample(prompt, episode)}") for episode in episodes]
        weighed = weigh_group(self._values(outcomes, len(episodes)), self._weights)
        return [self._result(prompt, episode, reward) for episode, reward in zip(episodes, weighed, strict=True)]

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        await self._pool.close()

    def _values(self, outcomes: Sequence[Outcome], count: int) -> list[SampleValue]:
        """The one function's values, or each sample's values of all functions by component."""
        if not self._components:
            values: list[SampleValue] = outcomes[0].value
            return values
        columns = {
            name: [_component(value) for value in outcome.value]
            for name, outcome in zip(self._components, outcomes, strict=True)
        }
        return [{name: column[index] for name, column in columns.items()} for index in range(count)]

    def _result(self, prompt: Prompt, episode: Episode, weighed: Weighed) -> StepResult:
        completion = episode.completion
        if weighed.fault:
            targets = ", ".join(self._targets)
            detail = f"{targets}, {_sample(prompt, episode)}: {weighed.fault}"
            return failed(RolloutStatus.REWARD_INVALID, detail)
        return StepResult(
            messages=(),
            reward=weighed.reward,
            done=True,
            metrics={"properly_ended": _ended(completion)},
            components=weighed.components,
            flags=thinking_flags(completion.text, self._think_tags),
        )


def _component(value: SampleValue) -> Value:
    return Fault("returned a mapping, expected the number of one component") if isinstance(value, dict) else value


def _sample(prompt: Prompt, episode: Episode) -> str:
    return f"prompt {prompt.prompt_id}, sample {episode.sample}"


def _ended(completion: Completion) -> float:
    return float(completion.finish_reason is FinishReason.STOP)


def _plain(messages: Sequence[Message]) -> str | list[dict[str, str]]:
    if len(messages) == 1 and messages[0].role == PLAIN_TEXT:
        return messages[0].content
    return [{"role": message.role, "content": message.content} for message in messages]
