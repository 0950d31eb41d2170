"""Tests of rl.rollout.buffer: the state machine, with virtual time."""

import asyncio

import pytest

from rl.core.errors import ConfigError, FatalError
from rl.core.types import Dropped, Rollout, RolloutGroup, Turn
from rl.rollout.buffer import GroupState, ReplayBuffer
from rl.rollout.sampler import InOrder
from rl.rollout.ticket import Ticket
from tests.support.buffers import reserved
from tests.support.clock import FakeClock
from tests.support.fakes import make_completion, make_prompt


def make_group(ticket: Ticket, version: int = 0) -> RolloutGroup:
    turn = Turn((1, 2), make_completion(version))
    return RolloutGroup(ticket.seq, make_prompt(ticket.seq), (Rollout(f"{ticket.seq}/0", (turn,), 1.0),))


def make_buffer(lookahead: int = 0, n: int = 2, capacity: int | None = None, replacements: int = 0) -> ReplayBuffer:
    return ReplayBuffer(InOrder(lookahead), n, capacity or n * (lookahead + 1), replacements)


async def test_the_gate_admits_the_steps_of_the_window_and_opens_with_the_version() -> None:
    buffer = make_buffer(lookahead=1, capacity=8)
    assert await reserved(buffer) == [0, 1, 2, 3]
    for seq in (0, 1):
        await buffer.put(Ticket(seq, 0), make_group(Ticket(seq, 0)))
    await buffer.take(2)
    await buffer.advance(1)
    assert await reserved(buffer) == [4, 5]


async def test_capacity_is_held_until_the_step_is_closed() -> None:
    buffer = make_buffer(lookahead=1, n=2, capacity=4)
    tickets = [await buffer.reserve() for _ in range(4)]
    for ticket in tickets:
        await buffer.put(ticket, make_group(ticket))
    assert buffer.live == 4
    await buffer.take(2)
    assert buffer.live == 4
    await buffer.advance(1)
    assert buffer.live == 2


async def test_take_returns_the_groups_in_dispatch_order_however_they_finish() -> None:
    buffer = make_buffer(n=3)
    tickets = [await buffer.reserve() for _ in range(3)]
    take = asyncio.ensure_future(buffer.take(3))
    for ticket in reversed(tickets):
        await FakeClock().settle()
        assert not take.done()
        await buffer.put(ticket, make_group(ticket))
    assert [group.group_id for group in await take] == [0, 1, 2]


async def test_a_ticket_ends_exactly_once() -> None:
    buffer = make_buffer()
    ticket = await buffer.reserve()
    await buffer.put(ticket, make_group(ticket))
    with pytest.raises(ValueError, match="ends exactly once"):
        await buffer.put(ticket, make_group(ticket))
    with pytest.raises(ValueError, match="unknown"):
        await buffer.put(Ticket(99, 49), make_group(ticket))


async def test_a_drop_opens_its_ticket_again_and_is_served_first() -> None:
    buffer = make_buffer(lookahead=1, replacements=1)
    first, _ = await buffer.reserve(), await buffer.reserve()
    await buffer.put(first, Dropped("infra_error", 5, "engine died"))
    again = await buffer.reserve()
    assert again == Ticket(0, 0, replacement=1)
    with pytest.raises(ValueError, match="running"):
        await buffer.put(first, make_group(first))
    await buffer.put(again, make_group(again))
    assert buffer.drain_counters()["replaced_prompt_groups"] == 1


async def test_a_drop_without_replacements_left_shrinks_the_step() -> None:
    buffer = make_buffer(n=2)
    first, second = await buffer.reserve(), await buffer.reserve()
    take = asyncio.ensure_future(buffer.take(2))
    await buffer.put(first, make_group(first))
    await FakeClock().settle()
    assert not take.done()
    await buffer.put(second, Dropped("data_error", 2, "bad row"))
    assert [group.group_id for group in await take] == [0]
    assert buffer.live == 1
    assert buffer.drain_counters()["dropped_prompt_groups/data_error"] == 1


async def test_a_step_without_groups_is_fatal_and_says_why() -> None:
    buffer = make_buffer(n=2, replacements=0)
    for _ in range(2):
        await buffer.put(await buffer.reserve(), Dropped("data_error", 2, "KeyError: 'answer'"))
    with pytest.raises(FatalError, match=r"step 1 .* all 2 were dropped.*2 data_error.*KeyError: 'answer'"):
        await buffer.take(2)


async def test_a_group_older_than_the_bound_is_fatal() -> None:
    buffer = make_buffer(n=1)
    await buffer.put(await buffer.reserve(), make_group(Ticket(0, 0), version=0))
    await buffer.take(1)
    await buffer.advance(1)
    ticket = await buffer.reserve()
    await buffer.put(ticket, make_group(ticket, version=0))
    with pytest.raises(FatalError, match="missed a refit"):
        await buffer.take(1)


async def test_the_version_only_grows() -> None:
    buffer = make_buffer()
    with pytest.raises(ValueError, match="must grow"):
        await buffer.advance(0)


async def test_no_ticket_is_issued_beyond_the_last_step() -> None:
    buffer = make_buffer(lookahead=3, n=2)
    buffer.limit_steps(1)
    assert await reserved(buffer) == [0, 1, 2, 3]


async def test_a_capacity_below_the_samplers_need_names_the_key_and_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_buffered_rollouts=5 .* need 6"):
        make_buffer(lookahead=2, n=2, capacity=5)


async def test_a_restart_begins_at_the_first_group_that_no_step_has_trained() -> None:
    buffer = make_buffer(lookahead=1, n=2)
    tickets = [await buffer.reserve() for _ in range(4)]
    for ticket in tickets[:3]:
        await buffer.put(ticket, make_group(ticket))
    await buffer.take(2)
    assert buffer.untrained() == [0, 1, 2, 3]
    await buffer.advance(1)
    assert buffer.untrained() == [2, 3]
    assert buffer.state_dict() == {"version": 1, "next_seq": 2}
    restored = make_buffer(lookahead=1, n=2)
    restored.load_state_dict(buffer.state_dict())
    assert await restored.reserve() == Ticket(2, 1)


async def test_a_restart_issues_cancelled_tickets_of_later_steps_again() -> None:
    buffer = make_buffer(lookahead=1, n=2, replacements=0)
    tickets = [await buffer.reserve() for _ in range(4)]
    for ticket in tickets[:2]:
        await buffer.put(ticket, make_group(ticket))
    await buffer.put(tickets[2], Dropped("data_error", 1, ""))
    await buffer.take(2)
    await buffer.advance(1)
    assert buffer.state_dict() == {"version": 1, "next_seq": 2}


async def test_ended_groups_leave_no_record_behind() -> None:
    buffer = make_buffer(n=2)
    for version in range(50):
        for _ in range(2):
            ticket = await buffer.reserve()
            await buffer.put(ticket, make_group(ticket, version))
        await buffer.take(2)
        await buffer.advance(version + 1)
    assert all(buffer.count(state) == 0 for state in GroupState)
    assert buffer.live == 0
