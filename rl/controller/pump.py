"""The rollout pump: pairs tickets with prompts and sends them out.

consumes: tickets (`ReplayBuffer.reserve`), prompts (`PromptSource.next`)
produces: finished groups and drops (`ReplayBuffer.put`)
waits for: the next ticket; an open hold
unblocked by: `ReplayBuffer.advance` and `put`; the end of a hold
"""

import asyncio
from collections.abc import AsyncIterator
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
        self._positions: dict[int, dict[str, Any]] = {}
        self._open = asyncio.Event()
        self._open.set()

    async def run(self) -> None:
        """Dispatch until cancelled; the first fatal error of any group ends it, and with it all other groups."""
        async with asyncio.TaskGroup() as groups:
            while True:
                ticket = await self._buffer.reserve()
                await self._open.wait()
                if ticket.replacement == 0:
                    self._remember(ticket)
                groups.create_task(self._run_group(self._prompts.next(), ticket), name=f"group {ticket.seq}")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Start no further group inside the block; groups in flight go on."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def resume_position(self) -> dict[str, Any]:
        """The prompt source's position at the first group that no step has trained: where a restart begins."""
        return self._positions.get(self._buffer.first_untrained_seq()) or self._prompts.state_dict()

    def _remember(self, ticket: Ticket) -> None:
        """Note where the source stands before the ticket's prompt, for the groups from which a restart can begin."""
        first = self._buffer.first_untrained_seq()
        self._positions = {seq: position for seq, position in self._positions.items() if seq >= first}
        self._positions[ticket.seq] = self._prompts.state_dict()

    async def _run_group(self, prompt: Prompt, ticket: Ticket) -> None:
        with self._activity.span():
            result = await self._manager.run_group(prompt, self._num_generations, ticket)
        await self._buffer.put(ticket, result)
