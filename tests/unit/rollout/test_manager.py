"""Tests of rl.rollout.manager."""

import asyncio
from collections.abc import Callable

import pytest

from rl.core.errors import CompletionError, DataError, FatalError, InfraError
from rl.core.types import Dropped, RolloutGroup, RolloutStatus
from rl.generation.generator import SamplingParams
from rl.rollout.config import RolloutFailureConfig
from rl.rollout.manager import RolloutManager
from rl.rollout.movement import Movement
from rl.rollout.runner import GroupRunner, RunnerLimits
from rl.rollout.ticket import Ticket
from rl.rollout.unscored import Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt, plain_conversations

SAMPLING = SamplingParams(1.0, 1.0, None, 8, (2,), (), 0)


def make_manager(
    generator: FakeGenerator, clock: FakeClock, environment: EchoEnvironment | None = None, max_inflight: int = 4
) -> RolloutManager:
    limits = RunnerLimits(1, 64, generation_timeout_s=100.0, env_timeout_s=5.0)
    runner = GroupRunner(
        generator,
        {"echo": environment or EchoEnvironment()},
        SAMPLING,
        plain_conversations(),
        limits,
        clock,
        Unscored(),
    )
    return RolloutManager(
        runner, RolloutFailureConfig(), max_inflight, seed=1, name="train", clock=clock, movement=Movement()
    )


def failing(times: int, error: Callable[[], Exception]) -> Callable[[str], Exception | None]:
    """Fail the attempts 0 .. times - 1."""
    return lambda request: error() if int(request.split("-a")[1].split("-")[0]) < times else None


async def test_an_infrastructure_error_is_retried_after_a_pause_with_other_seeds() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, failure=failing(2, lambda: InfraError("engine died")))
    manager = make_manager(generator, clock)
    group = await clock.run(manager.run_group(make_prompt(0), 2, Ticket(3, 1)))
    assert isinstance(group, RolloutGroup)
    assert group.group_id == 3
    assert clock.now() == 3.0
    assert manager.drain_counters()["num_infra_retries"] == 2
    assert len({request.params.seed for request in generator.requests}) == len(generator.requests)


async def test_a_group_that_keeps_failing_is_dropped_with_its_reason() -> None:
    clock = FakeClock()
    manager = make_manager(FakeGenerator(clock, failure=lambda _: InfraError("engine died")), clock)
    dropped = await clock.run(manager.run_group(make_prompt(0), 2, Ticket(0, 0)))
    assert dropped == Dropped("infra_error", 5, "InfraError: engine died")
    assert manager.drain_counters()["num_failed_prompt_groups"] == 1
    assert manager.movement.inflight == 0


async def test_samples_without_a_usable_completion_are_counted() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, failure=lambda request: CompletionError("nan") if "-s1-" in request else None)
    manager = make_manager(generator, clock)
    group = await clock.run(manager.run_group(make_prompt(0), 3, Ticket(0, 0)))
    assert isinstance(group, RolloutGroup) and len(group.rollouts) == 2
    counters = manager.drain_counters()
    assert (counters["num_unusable_samples"], counters["num_infra_retries"]) == (1, 0)


async def test_a_data_error_is_tried_twice_without_a_pause() -> None:
    clock = FakeClock()
    manager = make_manager(FakeGenerator(clock, failure=lambda _: DataError("too long")), clock)
    dropped = await clock.run(manager.run_group(make_prompt(0), 2, Ticket(0, 0)))
    assert dropped == Dropped("data_error", 2, "DataError: too long")
    assert clock.now() == 0.0


async def test_a_fatal_error_flies() -> None:
    clock = FakeClock()
    manager = make_manager(FakeGenerator(clock, failure=lambda _: FatalError("stop")), clock)
    with pytest.raises(FatalError, match="stop"):
        await clock.run(manager.run_group(make_prompt(0), 2, Ticket(0, 0)))


async def test_the_limit_of_groups_in_flight_holds_and_a_pausing_group_gives_its_place_away() -> None:
    clock = FakeClock()
    generator = FakeGenerator(
        clock,
        latency=lambda _: 0.1,
        failure=lambda request: InfraError("x") if request.startswith("train-0.") and "-a0-" in request else None,
    )
    manager = make_manager(generator, clock, max_inflight=1)
    order: list[int] = []

    async def run(seq: int) -> None:
        await manager.run_group(make_prompt(seq), 3, Ticket(seq, 0))
        order.append(seq)

    async def run_all() -> None:
        await asyncio.gather(run(0), run(1), run(2))

    await clock.run(run_all())
    assert generator.max_running == 3
    assert order == [1, 2, 0]


async def test_reward_failures_are_counted_apart_from_zeros_and_by_kind() -> None:
    clock = FakeClock()
    statuses = [
        RolloutStatus.REWARD_ERROR,
        RolloutStatus.REWARD_TIMEOUT,
        RolloutStatus.REWARD_INVALID,
        RolloutStatus.OK,
    ]
    environment = EchoEnvironment(reward=lambda _: 0.0, status=lambda index: statuses[index])
    manager = make_manager(FakeGenerator(clock), clock, environment)
    await manager.run_group(make_prompt(0), 4, Ticket(0, 0))
    counters = manager.drain_counters()
    assert counters["num_reward_errors"] == counters["num_reward_timeouts"] == counters["num_reward_invalid"] == 1
    assert set(manager.drain_counters().values()) == {0}


async def test_a_cancelled_group_gives_its_place_back() -> None:
    clock = FakeClock()
    manager = make_manager(FakeGenerator(clock, latency=lambda _: 1e9), clock, max_inflight=1)
    task = asyncio.ensure_future(manager.run_group(make_prompt(0), 2, Ticket(0, 0)))
    await clock.settle()
    assert manager.movement.inflight == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert manager.movement.inflight == 0
