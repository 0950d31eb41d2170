"""The environment's contract. Plain async classes; heavy scoring belongs into a process pool behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rl.core.types import Completion, Message, Prompt, RolloutStatus


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one completion.

    Attributes:
        messages: Messages for the next turn; empty when done.
        reward: Reward of this turn; NaN unless status is OK.
        done: Whether the rollout ends.
        status: OK, or how scoring failed; a failed sample does not vote in the group's baseline.
        metrics: Named numbers.
        detail: The error, for the log.
    """

    messages: tuple[Message, ...]
    reward: float
    done: bool
    status: RolloutStatus = RolloutStatus.OK
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


class Environment(Protocol):
    """Scores the rollouts of one prompt group and, in multi-turn tasks, answers them."""

    async def step(self, prompt: Prompt, completions: list[Completion]) -> list[StepResult]:
        """Answer the current completions of all siblings of one prompt; one result per completion, in order.

        Never raises for a faulty sample or reward function: that is a StepResult with a failed status. Every call
        returns within the environment's configured deadline.
        """
        ...

    async def close(self) -> None:
        """End what the environment started; idempotent."""
        ...
