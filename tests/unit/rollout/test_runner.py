"""Tests of rl.rollout.runner."""

import math

import pytest

from rl.core.errors import ConfigError, DataError, InfraError
from rl.core.types import Prompt, RolloutStatus
from rl.environments.base import Episode, StepResult
from rl.generation.generator import SamplingParams
from rl.rollout.runner import Attempt, GroupRunner, RunnerLimits
from rl.rollout.unscored import Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt

SAMPLING = SamplingParams(1.0, 1.0, None, 8, (2,), (), 0)
ATTEMPT = Attempt(run_seed=1, group_id=7, replacement=0, number=0, prefix="train")


def make_runner(
    generator: FakeGenerator, environment: EchoEnvironment, clock: FakeClock, max_turns: int = 1, max_tokens: int = 64
) -> GroupRunner:
    limits = RunnerLimits(max_turns, max_tokens, generation_timeout_s=10.0, env_timeout_s=5.0)
    return GroupRunner(
        generator, {"echo": environment}, SAMPLING, lambda messages: (9,) * len(messages), limits, clock, Unscored()
    )


async def test_siblings_keep_their_order_and_rewards() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda request: 3.0 if "-s0-" in request else 1.0)
    rollouts = await clock.run(make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 3, ATTEMPT))
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0]
    assert [rollout.rollout_id for rollout in rollouts] == ["7/0", "7/1", "7/2"]


async def test_every_sample_and_attempt_has_its_own_seed_and_the_group_one_session() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock)
    runner = make_runner(generator, EchoEnvironment(), clock)
    for number in range(2):
        await runner.run(make_prompt(0), 4, Attempt(1, 7, 0, number, "train"))
    assert len({request.params.seed for request in generator.requests}) == 8
    assert len({request.request_id for request in generator.requests}) == 8
    assert {request.session for request in generator.requests} == {"train-7"}


async def test_turns_go_on_until_the_environment_is_done_and_rewards_add_up() -> None:
    clock = FakeClock()
    environment = EchoEnvironment(reward=lambda index: 1.0 + index, turns=3)
    rollouts = await make_runner(FakeGenerator(clock), environment, clock, max_turns=5).run(make_prompt(0), 2, ATTEMPT)
    assert [len(rollout.turns) for rollout in rollouts] == [3, 3]
    assert [rollout.reward for rollout in rollouts] == [3.0, 6.0]
    assert rollouts[0].turns[1].prompt_tokens == (1, 2, 3, 5, 6, 9)


async def test_the_turn_limit_and_the_context_end_a_rollout() -> None:
    clock = FakeClock()
    by_turns = await make_runner(FakeGenerator(clock), EchoEnvironment(turns=9), clock, max_turns=2).run(
        make_prompt(0), 1, ATTEMPT
    )
    assert len(by_turns[0].turns) == 2
    by_context = await make_runner(
        FakeGenerator(clock), EchoEnvironment(turns=9), clock, max_turns=9, max_tokens=9
    ).run(make_prompt(0), 1, ATTEMPT)
    assert len(by_context[0].turns) == 2


async def test_the_completion_is_bounded_by_what_the_context_leaves() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock)
    await make_runner(generator, EchoEnvironment(), clock, max_tokens=7).run(make_prompt(0), 1, ATTEMPT)
    assert generator.requests[0].params.max_new_tokens == 4


async def test_a_prompt_that_fills_the_context_is_a_data_error() -> None:
    clock = FakeClock()
    with pytest.raises(DataError, match="leaves no room"):
        await make_runner(FakeGenerator(clock), EchoEnvironment(), clock, max_tokens=3).run(make_prompt(0), 1, ATTEMPT)


async def test_a_failed_reward_is_not_a_zero() -> None:
    clock = FakeClock()
    environment = EchoEnvironment(status=lambda i: RolloutStatus.REWARD_ERROR if i == 1 else RolloutStatus.OK)
    rollouts = await make_runner(FakeGenerator(clock), environment, clock).run(make_prompt(0), 2, ATTEMPT)
    assert rollouts[0].status is RolloutStatus.OK
    assert rollouts[1].status is RolloutStatus.REWARD_ERROR
    assert math.isnan(rollouts[1].reward)


async def test_the_first_failing_sibling_cancels_the_others() -> None:
    clock = FakeClock()
    generator = FakeGenerator(
        clock,
        latency=lambda request: 1.0 if "-s1-" in request else 9.0,
        failure=lambda request: InfraError("engine died") if "-s1-" in request else None,
    )
    with pytest.raises(InfraError, match="engine died"):
        await clock.run(make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 3, ATTEMPT))
    assert clock.now() == 1.0
    assert generator.running == 0


async def test_a_hanging_generator_and_a_hanging_environment_meet_their_deadlines() -> None:
    class Hanging(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            await clock.sleep(1e9)
            return []

    clock = FakeClock()
    with pytest.raises(InfraError, match=r"generation of train-7.* within 10 s"):
        generator = FakeGenerator(clock, latency=lambda _: 1e9)
        await clock.run(make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 1, ATTEMPT))
    with pytest.raises(InfraError, match="environment 'echo' .* within 5 s"):
        await clock.run(make_runner(FakeGenerator(clock), Hanging(), clock).run(make_prompt(0), 1, ATTEMPT))


async def test_a_wrong_number_of_results_is_a_data_error() -> None:
    class Short(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            return (await super().step(prompt, episodes))[1:]

    clock = FakeClock()
    with pytest.raises(DataError, match="2 completions with 1 results"):
        await make_runner(FakeGenerator(clock), Short(), clock).run(make_prompt(0), 2, ATTEMPT)


async def test_an_unknown_environment_lists_the_known_ones() -> None:
    clock = FakeClock()
    with pytest.raises(ConfigError, match="'math'; the env section has: echo"):
        await make_runner(FakeGenerator(clock), EchoEnvironment(), clock).run(make_prompt(0, "math"), 1, ATTEMPT)
