"""What a replay buffer hands out now, without waiting."""

import asyncio

from rl.rollout.buffer import ReplayBuffer
from rl.rollout.ticket import Ticket
from tests.support.clock import FakeClock


async def reserved_tickets(buffer: ReplayBuffer) -> list[Ticket]:
    """The tickets that can be reserved now."""
    tickets = []
    while True:
        task = asyncio.ensure_future(buffer.reserve())
        await FakeClock().settle()
        if not task.done():
            task.cancel()
            return tickets
        tickets.append(task.result())


async def reserved(buffer: ReplayBuffer) -> list[int]:
    """Their sequence numbers."""
    return [ticket.seq for ticket in await reserved_tickets(buffer)]
