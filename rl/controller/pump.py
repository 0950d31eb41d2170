"""The rollout pump: pairs tickets with prompts and sends them out.

consumes: tickets (`ReplayBuffer.reserve`), prompts (`PromptSource.next`)
produces: finished groups and drops (`ReplayBuffer.put`)
waits for: the next ticket; an open hold
unblocked by: `ReplayBuffer.advance` and `put`; the end of a hold
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rl.controller.activity import Activity
from rl.core.types import Dropped, Prompt, RolloutGroup
from rl.rollout.buffer import ReplayBuffer
from rl.rollout.ticket import Ticket


class Prompts(Protocol):
    """The side of a prompt source that the pump needs."""

    def next(self) -> Prompt:
        """Return the next prompt; the source is endless."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, so that a restored source continues with the same prompts."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position."""
        ...


class GroupRuns(Protocol):
    """The side of a RolloutManager that the pump needs."""

    async def run_group(self, prompt: Prompt, n: int, ticket: Ticket) -> RolloutGroup | Dropped:
        """Roll out one group."""
        ...


class RolloutPump:
    """Dispatches groups as long as the buffer hands out tickets.

    Args:
        buffer: Where groups go.
        prompts: Where prompts come from.
        manager: Who rolls them out.
        num_generations: Rollouts of one prompt.
        activity: Records when generation is under way.
    """

    def __init__(
        self, buffer: ReplayBuffer, prompts: Prompts, manager: GroupRuns, num_generations: int, activity: Activity
    ) -> None:
        self._buffer = buffer
        self._prompts = prompts
        self._manager = manager
        self._num_generations = num_generations
        self._activity = activity
        # Where the source stood before it gave a ticket's present prompt, for the tickets that a restart issues again.
        self._draws: dict[int, Mapping[str, Any]] = {}
        # Prompts of an earlier process that no step has trained; they come first.
        self._again: deque[Mapping[str, Any]] = deque()
        self._open = asyncio.Event()
        self._open.set()

    async def run(self) -> None:
        """Dispatch until cancelled; the first fatal error of any group ends it, and with it all other groups."""
        async with asyncio.TaskGroup() as groups:
            while True:
                ticket = await self._buffer.reserve()
                await self._open.wait()
                groups.create_task(self._run_group(self._draw(ticket), ticket), name=f"group {ticket.seq}")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Start no further group inside the block; groups in flight go on."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, and the prompts before it that no step has trained: a restart begins with those.

        Prompts are handed out ahead of training, and replacements of dropped ones ahead of their turn, so the position
        alone would repeat some prompts or lose them.
        """
        self._forget_trained()
        again = [self._draws[seq] for seq in sorted(self._draws)]
        return {"source": self._prompts.state_dict(), "again": [*again, *self._again]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; before `run`."""
        self._prompts.load_state_dict(state["source"])
        self._again = deque(state["again"])

    def _draw(self, ticket: Ticket) -> Prompt:
        """Take the next prompt for `ticket`, and note from where."""
        self._forget_trained()
        position = self._prompts.state_dict()
        if not self._again:
            self._draws[ticket.seq] = position
            return self._prompts.next()
        self._draws[ticket.seq] = self._again.popleft()
        self._prompts.load_state_dict(self._draws[ticket.seq])
        prompt = self._prompts.next()
        self._prompts.load_state_dict(position)
        return prompt

    def _forget_trained(self) -> None:
        untrained = self._buffer.untrained()
        self._draws = {seq: self._draws[seq] for seq in untrained if seq in self._draws}

    async def _run_group(self, prompt: Prompt, ticket: Ticket) -> None:
        with self._activity.span():
            result = await self._manager.run_group(prompt, self._num_generations, ticket)
        await self._buffer.put(ticket, result)
