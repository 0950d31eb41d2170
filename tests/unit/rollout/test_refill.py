"""Tests of rl.rollout.refill and of dynamic sampling in rl.rollout.buffer."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.core.errors import ConfigError, FatalError
from rl.core.types import Dropped, Rollout, RolloutGroup, RolloutStatus, Turn
from rl.rollout.buffer import GroupState, ReplayBuffer
from rl.rollout.refill import Refill, RefillTally, describe_failure
from rl.rollout.sampler import InOrderRefill, started_groups
from rl.rollout.ticket import Ticket
from tests.support.buffers import reserved, reserved_tickets
from tests.support.clock import FakeClock
from tests.support.fakes import make_completion, make_prompt

MIXED, ALL_RIGHT, ALL_WRONG = (1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)


def has_varied_rewards(group: RolloutGroup) -> bool:
    rewards = [rollout.reward for rollout in group.rollouts if rollout.is_valid]
    return bool(rewards) and max(rewards) > min(rewards)


def make_group(ticket: Ticket, rewards: Sequence[float] = MIXED, version: int = 0) -> RolloutGroup:
    turn = Turn((1, 2), make_completion(version))
    rollouts = tuple(Rollout(f"{ticket.seq}/{i}", (turn,), reward) for i, reward in enumerate(rewards))
    return RolloutGroup(ticket.seq, make_prompt(ticket.seq), rollouts)


def make_buffer(
    n: int = 2, lookahead: int = 0, multiplier: float = 1.0, max_batches: int = 10, replacements: int = 0
) -> ReplayBuffer:
    sampler = InOrderRefill(lookahead, multiplier)
    refill = Refill(has_varied_rewards, started_groups(n, multiplier), max_batches, window=lookahead + 1)
    return ReplayBuffer(sampler, n, sampler.required_capacity(n), replacements, refill)


async def put_next(buffer: ReplayBuffer, rewards: Sequence[float]) -> int:
    ticket = await buffer.reserve()
    await buffer.put(ticket, make_group(ticket, rewards, buffer.version))
    return ticket.seq


async def step(buffer: ReplayBuffer, n: int = 2) -> list[int]:
    groups = await buffer.take(n)
    await buffer.advance(buffer.version + 1)
    return [group.group_id for group in groups]


async def test_equal_rewards_give_their_place_to_the_next_prompts_until_the_step_is_full() -> None:
    buffer = make_buffer(n=2, multiplier=1.5)
    for rewards in (ALL_RIGHT, ALL_WRONG, MIXED):
        await put_next(buffer, rewards)
    assert buffer.count(GroupState.READY) == 1
    assert buffer.live == 1
    second_batch = [await put_next(buffer, MIXED) for _ in range(2)]
    assert second_batch == [3, 4]
    assert await step(buffer) == [2, 3]
    assert buffer.drain_counters() == {
        "replaced_prompt_groups": 0,
        "dropped_prompt_groups": 0,
        "dynamic_sampling_num_gen_batches": 4 / 3,
        "dynamic_sampling_num_filtered_groups": 2,
        "dynamic_sampling_num_discarded_valid_samples": 8,
        "dynamic_sampling_num_carried_groups": 1,
        "unfiltered_reward": 0.5,
    }


async def test_surplus_groups_are_trained_first_in_the_next_step() -> None:
    buffer = make_buffer(n=2, multiplier=2.0)
    assert [await put_next(buffer, MIXED) for _ in range(4)] == [0, 1, 2, 3]
    assert await reserved(buffer) == []
    assert await step(buffer) == [0, 1]
    assert buffer.drain_counters()["dynamic_sampling_num_carried_groups"] == 2
    assert [await put_next(buffer, MIXED) for _ in range(2)] == [4, 5]
    assert await step(buffer) == [2, 3]
    assert buffer.drain_counters()["dynamic_sampling_num_filtered_groups"] == 0


async def test_a_synchronous_step_starts_no_more_than_it_lacks() -> None:
    buffer = make_buffer(n=3)
    tickets = [await buffer.reserve() for _ in range(3)]
    assert await reserved(buffer) == []
    await buffer.put(tickets[1], make_group(tickets[1], ALL_WRONG))
    assert await reserved(buffer) == [3]
    await buffer.put(tickets[0], make_group(tickets[0]))
    assert await reserved(buffer) == []


async def test_rewards_that_never_vary_end_the_run_with_their_shares() -> None:
    buffer = make_buffer(n=2, max_batches=3)
    buffer.limit_steps(5)
    for rewards in [ALL_WRONG] * 3 + [ALL_RIGHT] * 2 + [MIXED]:
        await put_next(buffer, rewards)
    assert await reserved(buffer) == []
    with pytest.raises(
        FatalError,
        match=r"step 1 cannot be filled: 5 of 6 prompt groups \(83%\) had equal rewards.*1 of the 2 needed.*"
        r"50% all 0, 33% all 1.*easier prompts.*num_generations_per_prompt.*max_gen_batches=3 \(batches of 2 groups\)",
    ):
        await buffer.take(2)


async def test_one_group_over_the_bound_does_not_save_a_step_and_one_at_the_bound_does() -> None:
    late = make_buffer(n=2, lookahead=1, max_batches=2)
    for rewards in (MIXED, ALL_WRONG, ALL_WRONG, ALL_WRONG, MIXED):
        await put_next(late, rewards)
    with pytest.raises(FatalError, match="3 of 4 prompt groups"):
        await late.take(2)
    in_time = make_buffer(n=2, lookahead=1, max_batches=2)
    for rewards in (MIXED, ALL_WRONG, ALL_WRONG, MIXED):
        await put_next(in_time, rewards)
    assert await step(in_time) == [0, 3]


async def test_a_straggler_does_not_let_the_others_go_on_for_ever() -> None:
    buffer = make_buffer(n=2, max_batches=4)
    first = await buffer.reserve()
    for _ in range(7):
        await put_next(buffer, ALL_WRONG)
    assert await reserved(buffer) == []
    await buffer.put(first, make_group(first))
    with pytest.raises(FatalError, match="7 of 8 prompt groups"):
        await buffer.take(2)


async def test_a_step_takes_the_same_groups_however_they_finish() -> None:
    rewards = [MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED, MIXED]
    for seed in range(30):
        draw = random.Random(seed)
        buffer = make_buffer(n=2, lookahead=1)
        running: list[Ticket] = []
        while buffer.count(GroupState.READY) < 4:
            running += await reserved_tickets(buffer)
            ticket = running.pop(draw.randrange(len(running)))
            await buffer.put(ticket, make_group(ticket, rewards[ticket.seq]))
        assert await step(buffer) == [0, 2]
        assert buffer.drain_counters()["dynamic_sampling_num_gen_batches"] == 1.5
        assert await step(buffer) == [4, 5]
        assert buffer.drain_counters()["dynamic_sampling_num_filtered_groups"] == 1


async def test_a_failed_prompt_is_replaced_first_and_then_gives_its_place_away() -> None:
    buffer = make_buffer(n=2, replacements=1)
    first, second = await buffer.reserve(), await buffer.reserve()
    await buffer.put(second, make_group(second))
    await buffer.put(first, Dropped("data_error", 2, "bad row"))
    again = await buffer.reserve()
    assert again == Ticket(0, 0, replacement=1)
    await buffer.put(again, Dropped("data_error", 2, "bad row"))
    assert await put_next(buffer, MIXED) == 2
    assert await step(buffer) == [1, 2]
    counters = buffer.drain_counters()
    assert (counters["dropped_prompt_groups"], counters["replaced_prompt_groups"]) == (2, 1)
    assert counters["dynamic_sampling_num_filtered_groups"] == 0


async def test_a_step_in_which_every_prompt_fails_ends_as_without_dynamic_sampling() -> None:
    buffer = make_buffer(n=2)
    for _ in range(2):
        await buffer.put(await buffer.reserve(), Dropped("data_error", 2, "KeyError: 'answer'"))
    with pytest.raises(FatalError, match=r"step 1 .* all 2 were dropped.*2 data_error.*KeyError: 'answer'"):
        await buffer.take(2)


async def test_failures_among_equal_rewards_are_told_too() -> None:
    buffer = make_buffer(n=2, max_batches=1)
    await put_next(buffer, ALL_RIGHT)
    await buffer.put(await buffer.reserve(), Dropped("infra_error", 5, "engine died"))
    with pytest.raises(
        FatalError, match=r"1 of 2 prompt groups \(50%\).*1 groups were dropped.*infra_error: engine died"
    ):
        await buffer.take(2)


async def test_the_last_step_starts_no_surplus() -> None:
    buffer = make_buffer(n=2, multiplier=2.0, lookahead=1)
    buffer.limit_steps(1)
    assert await reserved(buffer) == [0, 1, 2, 3]


async def test_a_group_older_than_surplus_explains_is_fatal() -> None:
    for multiplier, bound in ((1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2)):
        assert InOrderRefill(0, multiplier).max_staleness == bound
        assert InOrderRefill(3, multiplier).max_staleness == 3 + bound
        buffer = make_buffer(n=2, multiplier=multiplier)
        for _ in range(bound + 1):
            await put_next(buffer, MIXED)
            await put_next(buffer, MIXED)
            await step(buffer)
        for _ in range(2):
            ticket = await buffer.reserve()
            await buffer.put(ticket, make_group(ticket, version=0))
        with pytest.raises(FatalError, match=f"version {bound + 1} may train none older than 1"):
            await buffer.take(2)


async def test_a_restart_tries_again_what_no_step_has_accounted_for() -> None:
    buffer = make_buffer(n=2, multiplier=2.0)
    for rewards in (MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED):
        await put_next(buffer, rewards)
    await buffer.take(2)
    assert buffer.untrained() == [0, 1, 2, 3, 4]
    assert buffer.state_dict() == {"version": 0, "next_seq": 0}
    await buffer.advance(1)
    assert buffer.untrained() == [3, 4]
    assert buffer.state_dict() == {"version": 1, "next_seq": 3}
    for restored in (make_buffer(n=2), make_buffer(n=2, multiplier=2.0)):
        restored.load_state_dict(buffer.state_dict())
        assert await restored.reserve() == Ticket(3, 1)
        assert restored.state_dict() == buffer.state_dict()


async def test_a_run_can_go_on_without_dynamic_sampling() -> None:
    buffer = make_buffer(n=2)
    for rewards in (MIXED, ALL_WRONG, MIXED):
        await put_next(buffer, rewards)
    await step(buffer)
    plain = ReplayBuffer(InOrderRefill(0, 1.0), 2, 2, 0)
    plain.load_state_dict(buffer.state_dict())
    assert [await put_next(plain, ALL_WRONG) for _ in range(2)] == [3, 4]
    assert await step(plain) == [3, 4]
    assert plain.state_dict() == {"version": 2, "next_seq": 5}


def test_the_capacity_covers_the_window_and_the_surplus() -> None:
    assert InOrderRefill(0, 1.0).required_capacity(4) == 4
    assert InOrderRefill(2, 1.5).required_capacity(4) == 14
    assert [n for n in range(30) if InOrderRefill(1, 1.5).may_admit(n, version=2, groups_per_step=4)] == list(range(18))
    with pytest.raises(ConfigError, match=r"max_buffered_rollouts=13 .* need 14"):
        ReplayBuffer(InOrderRefill(2, 1.5), 4, 13, 0, Refill(has_varied_rewards, 6, 10, 3))


def test_a_tally_counts_no_reward_that_is_missing() -> None:
    tally = RefillTally()
    tally.add((), is_filtered=True)
    assert "unfiltered_reward" not in tally.metrics(2, num_carried=0)
    tally.add((0.25, 0.75), is_filtered=False)
    assert tally.metrics(2, num_carried=0)["unfiltered_reward"] == 0.5
    assert tally.metrics(2, num_carried=0)["dynamic_sampling_num_gen_batches"] == 1.0
    assert tally.metrics(2, num_carried=0)["dynamic_sampling_num_discarded_valid_samples"] == 0.0


async def test_a_failed_reward_neither_varies_nor_counts() -> None:
    buffer = make_buffer(n=1, max_batches=2)
    ticket = await buffer.reserve()
    failed = Rollout("0/0", (Turn((1, 2), make_completion(0)),), float("nan"), RolloutStatus.REWARD_ERROR)
    await buffer.put(ticket, RolloutGroup(0, make_prompt(0), (failed, failed)))
    await put_next(buffer, ALL_WRONG)
    with pytest.raises(FatalError, match="50% without a valid reward, 50% all 0"):
        await buffer.take(1)


def test_many_different_rewards_are_summed_up() -> None:
    filtered = [(float(value),) for value in range(8)]
    text = describe_failure(Refill(has_varied_rewards, 5, 2), 3, 4, filtered, [])
    assert "step 3 cannot be filled: 8 of 10" in text
    assert "10% all 3, 40% others" in text


def test_rewards_that_fail_are_not_blamed_on_the_prompts() -> None:
    text = describe_failure(Refill(has_varied_rewards, 5, 2), 3, 4, [(), (), (1.0,)], [])
    assert "run.log says why" in text and "Use easier prompts" not in text
    assert "Use easier prompts" in describe_failure(Refill(has_varied_rewards, 5, 2), 3, 4, [(), (0.0,), (1.0,)], [])


@dataclass
class Interleaving:
    """A buffer under moves that hypothesis picks; checks its ledger after each of them."""

    data: st.DataObject
    buffer: ReplayBuffer
    n: int
    capacity: int
    reserving: asyncio.Future[Ticket] | None = None
    taking: asyncio.Future[list[RolloutGroup]] | None = None
    claimed: int = 0
    running: list[tuple[Ticket, int]] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    submitted: int = 0

    async def run(self, steps: int) -> None:
        self.buffer.limit_steps(steps - 1)
        while self.buffer.version < steps:
            moves = ["reserve"] * (self.reserving is None) + ["take"] * (self.taking is None and not self.claimed)
            moves += ["put"] * bool(self.running) + ["advance"] * bool(self.claimed)
            assert moves, "every ticket has ended, and nothing can move"
            await self.move(self.data.draw(st.sampled_from(moves)))
            await FakeClock().settle()
            self.collect()
            self.check_ledger()

    async def move(self, name: str) -> None:
        if name == "reserve":
            self.reserving = asyncio.ensure_future(self.buffer.reserve())
        elif name == "take":
            self.taking = asyncio.ensure_future(self.buffer.take(self.n))
        elif name == "put":
            ticket, version = self.running.pop(self.data.draw(st.integers(0, len(self.running) - 1)))
            kind = self.data.draw(st.sampled_from(["kept", "kept", "filtered", "dropped"]))
            self.ended[kind] += 1
            group = make_group(ticket, MIXED if kind == "kept" else ALL_WRONG, version)
            await self.buffer.put(ticket, Dropped("data_error", 1, "x") if kind == "dropped" else group)
        else:
            self.claimed = 0
            await self.buffer.advance(self.buffer.version + 1)

    def collect(self) -> None:
        if self.reserving is not None and self.reserving.done():
            self.running.append((self.reserving.result(), self.buffer.version))
            self.submitted += 1
            self.reserving = None
        if self.taking is not None and self.taking.done():
            groups = self.taking.result()
            assert len(groups) == self.n
            self.claimed = self.n
            self.trained += [group.group_id for group in groups]
            self.taking = None

    def check_ledger(self) -> None:
        count = self.buffer.count
        assert count(GroupState.RUNNING) == len(self.running)
        in_flight = len(self.running) + count(GroupState.READY)
        assert self.submitted == len(self.trained) + self.ended["filtered"] + self.ended["dropped"] + in_flight
        assert self.buffer.live == in_flight + count(GroupState.OPEN) + count(GroupState.CLAIMED) <= self.capacity


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_interleaving_loses_exceeds_or_blocks_and_every_step_is_full(data: st.DataObject) -> None:
    n, lookahead, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5))
    multiplier = data.draw(st.sampled_from([1.0, 1.5, 2.0, 3.0]))
    max_batches, replacements = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1))

    async def run() -> None:
        buffer = make_buffer(n, lookahead, multiplier, max_batches, replacements)
        house = Interleaving(data, buffer, n, n * lookahead + started_groups(n, multiplier))
        try:
            await house.run(steps)
        except FatalError as error:
            assert "cannot be filled" in str(error) or "no prompt group left" in str(error)
            return
        finally:
            for waiting in (house.reserving, house.taking):
                if waiting is not None:
                    waiting.cancel()
        assert house.trained == sorted(set(house.trained))
        assert len(house.trained) == n * steps
        assert buffer.live == 0
        counters = buffer.drain_counters()
        assert counters["dynamic_sampling_num_gen_batches"] <= max_batches * steps
        assert counters["dynamic_sampling_num_filtered_groups"] <= house.ended["filtered"]

    asyncio.run(run())
