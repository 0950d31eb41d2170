"""The environment's contract. Plain async classes; heavy scoring belongs into a process pool behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl.core.types import Completion, Message, Prompt, RolloutStatus, Turn, TurnFlag


@dataclass(frozen=True)
class Episode:
    """One sibling rollout when its environment is asked.

    Attributes:
        sample: Number of the sibling in its group.
        turns: Earlier turns, oldest first.
        completion: What is to be answered.
        state: What the environment returned as state with the turn before; None at the first turn.
    """

    sample: int
    turns: tuple[Turn, ...]
    completion: Completion
    state: Any = None


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one completion.

    Attributes:
        messages: Messages for the next turn; empty when done.
        reward: Reward of this turn; NaN unless status is OK.
        done: Whether the rollout ends.
        status: OK, or how scoring failed; a failed sample does not vote in the group's baseline.
        metrics: Named numbers; those of the last turn that reports a name are kept.
        detail: The error, for the log.
        components: Named parts of the reward; empty where it has none. Every sibling reports the same names.
        flags: What was wrong with the completion's form.
        state: Handed back with the next turn.
    """

    messages: tuple[Message, ...]
    reward: float
    done: bool
    status: RolloutStatus = RolloutStatus.OK
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    flags: frozenset[TurnFlag] = frozenset()
    state: Any = None


class Environment(Protocol):
    """Scores the rollouts of one prompt group and, in multi-turn tasks, answers them."""

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Answer the current completions of the siblings of one prompt that go on; one result each, in order.

        Never raises for a faulty sample or reward function: that is a StepResult with a failed status. Every call
        returns within the environment's configured deadline.
        """
        ...

    async def close(self) -> None:
        """End what the environment started; idempotent."""
        ...
