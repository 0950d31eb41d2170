"""Property tests of pump, buffer, manager and a train loop together, under random schedules in virtual time."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rl.algorithms.filters import keep_group
from rl.controller.activity import Activity
from rl.controller.pump import RolloutPump
from rl.core.errors import DataError, FatalError, InfraError
from rl.core.types import Prompt, RolloutGroup
from rl.environments.base import Episode, StepResult
from rl.generation.generator import SamplingParams
from rl.rollout.buffer import GroupState, ReplayBuffer
from rl.rollout.config import RolloutFailureConfig
from rl.rollout.manager import RolloutManager
from rl.rollout.movement import Movement
from rl.rollout.refill import Refill
from rl.rollout.runner import GroupRunner, RunnerLimits
from rl.rollout.sampler import InOrder, InOrderRefill, started_groups
from rl.rollout.seeds import stable_seed
from rl.rollout.unscored import Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, FakePromptSource, plain_conversations

SAMPLING = SamplingParams(1.0, 1.0, None, 8, (2,), (), 0)


@dataclass
class House:
    """The moving parts of a run without models."""

    clock: FakeClock
    generator: FakeGenerator
    buffer: ReplayBuffer
    manager: RolloutManager
    pump: RolloutPump
    source: FakePromptSource
    staleness: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    trained_per_step: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """Dynamic sampling of a house; `equal` says of which prompts the rewards do not vary."""

    multiplier: float = 1.0
    max_batches: int = 10
    equal: Callable[[str], bool] = lambda _: False


class RewardByPrompt:
    """Rewards 0, 1, ... for the siblings of a prompt, or 0 for all of them."""

    def __init__(self, equal: Callable[[str], bool]) -> None:
        self._equal = equal

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        equal = self._equal(prompt.prompt_id)
        return [StepResult((), 0.0 if equal else float(i), True) for i in range(len(episodes))]

    async def close(self) -> None:
        pass


def build(
    lookahead: int,
    n: int,
    generator: FakeGenerator,
    clock: FakeClock,
    capacity: int | None = None,
    replacements: int = 1,
    sampling: Sampling | None = None,
) -> House:
    buffer = make_buffer(lookahead, n, capacity, replacements, sampling)
    environment = EchoEnvironment() if sampling is None else RewardByPrompt(sampling.equal)
    limits = RunnerLimits(1, 64, 50.0, 5.0)
    runner = GroupRunner(generator, {"echo": environment}, SAMPLING, plain_conversations(), limits, clock, Unscored())
    manager = RolloutManager(
        runner, RolloutFailureConfig(), n * 2, seed=1, name="train", clock=clock, movement=Movement()
    )
    source = FakePromptSource()
    return House(clock, generator, buffer, manager, RolloutPump(buffer, source, manager, 2, Activity(clock)), source)


def make_buffer(
    lookahead: int, n: int, capacity: int | None, replacements: int, sampling: Sampling | None
) -> ReplayBuffer:
    if sampling is None:
        return ReplayBuffer(InOrder(lookahead), n, capacity or n * (lookahead + 1), replacements)
    sampler = InOrderRefill(lookahead, sampling.multiplier)
    refill = Refill(keep_group, started_groups(n, sampling.multiplier), sampling.max_batches, window=lookahead + 1)
    return ReplayBuffer(sampler, n, capacity or sampler.required_capacity(n), replacements, refill)


async def train(house: House, steps: int, n: int, seconds: float = 1.0) -> None:
    """Take, train for a while, refit, advance: the train loop of a run."""
    house.buffer.limit_steps(steps - 1)
    pump = asyncio.ensure_future(house.pump.run())
    try:
        for step in range(steps):
            take = asyncio.ensure_future(house.buffer.take(n))
            await asyncio.wait({take, pump}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            groups = take.result()
            house.staleness.append(max(step - group.version_min for group in groups))
            house.trained.extend(group.group_id for group in groups)
            house.trained_per_step.append(len(groups))
            await house.clock.sleep(seconds)
            await house.generator.pause("keep")
            await house.clock.sleep(seconds / 10)
            house.generator.version = step + 1
            await house.generator.resume()
            await house.buffer.advance(step + 1)
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


@pytest.mark.parametrize(
    ("lookahead", "expected"),
    [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 2, 2]), (3, [0, 1, 2, 3, 3, 3])],
)
async def test_staleness_grows_to_the_lookahead_and_stays_there(lookahead: int, expected: list[int]) -> None:
    clock = FakeClock()
    house = build(lookahead, 2, FakeGenerator(clock, latency=lambda _: 0.1), clock)
    await clock.run(train(house, 6, 2))
    assert house.staleness == expected
    assert house.trained == list(range(12))


@pytest.mark.parametrize("seed", range(150))
async def test_random_schedules_lose_nothing_exceed_nothing_and_never_deadlock(seed: int) -> None:
    draw = random.Random(seed)
    lookahead, n, steps = draw.randrange(4), draw.randint(1, 5), draw.randint(1, 6)
    capacity = n * (lookahead + 1) + draw.choice([0, 0, 1, 3])
    failure_rate = draw.choice([0.0, 0.1, 0.3])

    def share(request: str, what: str) -> float:
        return stable_seed(seed, request, what) / 2**63

    def failure(request: str) -> Exception | None:
        if share(request, "fails") >= failure_rate:
            return None
        return InfraError("engine") if share(request, "kind") < 0.5 else DataError("row")

    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda request: 3.0 * share(request, "latency"), failure=failure)
    house = build(lookahead, n, generator, clock, capacity, replacements=draw.randrange(3))
    live: list[int] = []

    async def watch() -> None:
        while True:
            live.append(house.buffer.live)
            await clock.sleep(0.37)

    watcher = asyncio.ensure_future(watch())
    try:
        await clock.run(train(house, steps, n, seconds=draw.choice([0.1, 1.0, 5.0])))
    except FatalError as error:
        # All groups of a step may fail by chance: that must be said, and is the only way to end early.
        assert "no prompt group left" in str(error)
        return
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    counters = house.buffer.drain_counters()
    cancelled = counters["dropped_prompt_groups"] - counters["replaced_prompt_groups"]
    assert house.trained == sorted(set(house.trained))
    assert len(house.trained) + cancelled == n * steps
    assert max(house.staleness) <= lookahead
    assert max(live) <= capacity
    assert house.buffer.live == 0
    assert house.manager.movement.inflight == 0
    assert all(house.buffer.count(state) == 0 for state in GroupState)


@pytest.mark.parametrize("seed", range(150))
async def test_random_schedules_with_dynamic_sampling_fill_every_step_and_lose_nothing(seed: int) -> None:
    draw = random.Random(seed)
    lookahead, n, steps = draw.randrange(3), draw.randint(1, 4), draw.randint(1, 6)
    multiplier, failure_rate = draw.choice([1.0, 1.5, 2.0, 2.5]), draw.choice([0.0, 0.1, 0.3])
    equal_rate = draw.choice([0.0, 0.3, 0.6, 0.9])

    def share(*what: str) -> float:
        return stable_seed(seed, *what) / 2**63

    def failure(request: str) -> Exception | None:
        return DataError("row") if share(request, "fails") < failure_rate else None

    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda request: 3.0 * share(request, "latency"), failure=failure)
    sampling = Sampling(multiplier, draw.choice([2, 5, 40]), lambda prompt: share(prompt, "equal") < equal_rate)
    house = build(lookahead, n, generator, clock, replacements=draw.randrange(3), sampling=sampling)
    try:
        await clock.run(train(house, steps, n, seconds=draw.choice([0.1, 1.0, 5.0])))
    except FatalError as error:
        assert "cannot be filled" in str(error) or "no prompt group left" in str(error)
        return
    counters = house.buffer.drain_counters()
    filtered = len([f"p{i}" for i in range(house.source.position) if sampling.equal(f"p{i}")])
    assert house.trained == sorted(set(house.trained))
    assert house.trained_per_step == [n] * steps
    assert max(house.staleness) <= InOrderRefill(lookahead, multiplier).max_staleness
    assert counters["dynamic_sampling_num_filtered_groups"] <= filtered
    assert house.source.position >= n * steps + counters["dropped_prompt_groups"]
    assert house.buffer.live == 0
    assert house.manager.movement.inflight == 0


async def test_rewards_that_never_vary_end_a_run_after_the_last_batch() -> None:
    clock = FakeClock()
    sampling = Sampling(max_batches=3, equal=lambda prompt: prompt != "p1")
    house = build(0, 2, FakeGenerator(clock, latency=lambda _: 1.0), clock, sampling=sampling)
    with pytest.raises(FatalError, match=r"5 of 6 prompt groups .*1 of the 2 needed.*83% all 0"):
        await clock.run(train(house, 2, 2))
    assert house.source.position == 6


async def test_a_hanging_rollout_ends_at_its_deadline_and_the_run_goes_on() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda request: 1e9 if request.startswith("train-1.0-s0-a0") else 0.1)
    house = build(0, 2, generator, clock)
    await clock.run(train(house, 2, 2))
    assert house.trained == [0, 1, 2, 3]
    assert house.manager.drain_counters()["num_infra_retries"] == 1


async def test_a_fatal_error_of_one_group_ends_the_pump_and_its_other_groups() -> None:
    clock = FakeClock()
    generator = FakeGenerator(
        clock,
        latency=lambda request: 1.0 if request.startswith("train-1.") else 1e6,
        failure=lambda request: FatalError("stop") if request.startswith("train-1.") else None,
    )
    house = build(0, 2, generator, clock)
    with pytest.raises(ExceptionGroup) as failures:
        await clock.run(house.pump.run())
    assert failures.group_contains(FatalError, match="stop")
    assert house.manager.movement.inflight == 0


async def test_held_starts_nothing_and_lets_running_groups_finish() -> None:
    clock = FakeClock()
    house = build(1, 1, FakeGenerator(clock, latency=lambda _: 1.0), clock)
    async with house.pump.held():
        pump = asyncio.ensure_future(house.pump.run())
        await clock.settle()
        assert house.generator.requests == []
    await clock.settle()
    assert len(house.generator.requests) == 4
    async with house.pump.held():
        clock.advance(1.0)
        await clock.settle()
        assert house.buffer.count(GroupState.READY) == 2
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)


async def test_a_restart_continues_with_the_prompt_of_the_first_untrained_group() -> None:
    clock = FakeClock()
    house = build(2, 2, FakeGenerator(clock, latency=lambda _: 0.1), clock)
    await clock.run(train(house, 2, 2))
    # Two steps are trained; nothing further was dispatched, because the run was limited to two steps.
    assert house.pump.state_dict() == {"source": {"position": 4}, "again": []}
    ahead = build(2, 2, FakeGenerator(clock, latency=lambda _: 0.1), clock)
    pump = asyncio.ensure_future(ahead.pump.run())
    taken = await clock.run(ahead.buffer.take(2))
    await ahead.buffer.advance(1)
    await clock.settle()
    assert [group.prompt.prompt_id for group in taken] == ["p0", "p1"]
    position = ahead.source.position
    assert position > 2
    again = [{"position": index} for index in range(2, position)]
    assert ahead.pump.state_dict() == {"source": {"position": position}, "again": again}
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)


async def train_and_save(house: House, steps: int, n: int, until: int) -> tuple[list[str], dict[str, Any]]:
    """Train up to step `until` with everything else running ahead; the trained prompts and the state of a save."""
    house.buffer.limit_steps(steps - 1)
    pump = asyncio.ensure_future(house.pump.run())
    trained: list[str] = []
    try:
        for step in range(house.buffer.version, until):
            groups = await house.buffer.take(n)
            trained += [group.prompt.prompt_id for group in groups]
            await house.clock.sleep(1.0)
            house.generator.version = step + 1
            await house.buffer.advance(step + 1)
        return trained, {"pump": house.pump.state_dict(), "buffer": house.buffer.state_dict()}
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("replacements", [0, 1, 2])
async def test_no_prompt_is_trained_twice_or_lost_by_restarts_with_drops(seed: int, replacements: int) -> None:
    """Restart after every step, with one step of lookahead, while a third of all prompts are dropped."""
    n, steps = 3, 5
    trained: list[str] = []
    tried: set[str] = set()
    state: dict[str, Any] = {}
    for until in range(1, steps + 1):
        clock = FakeClock()

        def failure(request: str, until: int = until) -> Exception | None:
            return DataError("row") if stable_seed(seed, request, until) / 2**63 < 0.3 else None

        generator = FakeGenerator(clock, latency=lambda request: stable_seed(seed, request) / 2**63, failure=failure)
        generator.version = until - 1
        house = build(1, n, generator, clock, replacements=replacements)
        if state:
            state = json.loads(json.dumps(state))
            house.pump.load_state_dict(state["pump"])
            house.buffer.load_state_dict(state["buffer"])
        try:
            new, state = await clock.run(train_and_save(house, steps, n, until))
        except FatalError as error:
            assert "no prompt group left" in str(error)
            return
        trained += new
        tried |= {f"p{index}" for index in range(house.source.position)}
    assert len(trained) == len(set(trained))
    assert set(trained) <= tried
    # What was tried and is not trained was dropped: it is not waiting anywhere.
    assert state["pump"]["again"] == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("lookahead", "multiplier"), [(0, 1.0), (0, 2.0), (1, 1.0), (2, 1.5)])
async def test_restarts_with_dynamic_sampling_train_every_prompt_that_varies_once(
    seed: int, lookahead: int, multiplier: float
) -> None:
    """Restart after every step. A prompt is trained once, or filtered, or still to come."""
    n, steps = 2, 6

    def is_equal(prompt: str) -> bool:
        return stable_seed(seed, prompt) / 2**63 < 0.5

    trained: list[str] = []
    state: dict[str, Any] = {}
    filtered = 0.0
    for until in range(1, steps + 1):
        clock = FakeClock()
        generator = FakeGenerator(clock, latency=lambda request, until=until: stable_seed(seed, request, until) / 2**63)
        generator.version = until - 1
        house = build(lookahead, n, generator, clock, sampling=Sampling(multiplier, 40, is_equal))
        if state:
            state = json.loads(json.dumps(state))
            house.pump.load_state_dict(state["pump"])
            house.buffer.load_state_dict(state["buffer"])
        new, state = await clock.run(train_and_save(house, steps, n, until))
        trained += new
        filtered += house.buffer.drain_counters()["dynamic_sampling_num_filtered_groups"]
    tried = [f"p{index}" for index in range(house.source.position)]
    again = [f"p{draw['position']}" for draw in state["pump"]["again"]]
    assert len(trained) == len(set(trained)) == n * steps
    assert {prompt for prompt in tried if not is_equal(prompt)} == set(trained) | {p for p in again if not is_equal(p)}
    # A step accounts for what was filtered before its last group, once, however often the run was restarted.
    numbers = [int(prompt[1:]) for prompt in trained]
    assert numbers == [number for number in range(numbers[-1] + 1) if not is_equal(f"p{number}")]
    assert filtered == numbers[-1] + 1 - len(numbers)
    if multiplier == 1 and lookahead == 0:
        assert again == []


async def test_the_replacement_of_a_dropped_prompt_is_not_trained_again_after_a_restart() -> None:
    clock = FakeClock()
    failing = FakeGenerator(
        clock,
        latency=lambda request: 0.1,
        failure=lambda request: DataError("row") if request.startswith("train-0.0-") else None,
    )
    house = build(1, 2, failing, clock)
    trained, state = await clock.run(train_and_save(house, 3, 2, 1))
    assert trained == ["p4", "p1"]
    assert [draw["position"] for draw in state["pump"]["again"]][:2] == [2, 3]
    resumed = build(1, 2, FakeGenerator(clock), clock)
    resumed.generator.version = 1
    resumed.pump.load_state_dict(state["pump"])
    resumed.buffer.load_state_dict(state["buffer"])
    assert (await clock.run(train_and_save(resumed, 3, 2, 3)))[0] == ["p2", "p3", "p5", "p6"]


async def test_groups_in_the_buffer_are_whole() -> None:
    clock = FakeClock()
    house = build(0, 3, FakeGenerator(clock), clock)
    pump = asyncio.ensure_future(house.pump.run())
    groups = await clock.run(house.buffer.take(3))
    assert all(isinstance(group, RolloutGroup) and len(group.rollouts) == 2 for group in groups)
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)
