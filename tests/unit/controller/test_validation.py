"""Tests of rl.controller.validation."""

from rl.controller.validation import Validator, validation_metrics
from rl.core.errors import DataError
from rl.core.types import RolloutStatus
from rl.data.prompts import HeldOut, Skipped
from rl.generation.generator import SamplingParams
from rl.rollout.config import RolloutFailureConfig
from rl.rollout.manager import RolloutManager
from rl.rollout.movement import Movement
from rl.rollout.runner import GroupRunner, RunnerLimits
from rl.rollout.unscored import Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt, plain_conversations
from tests.support.rollouts import make_completion, make_group, make_rollout

GREEDY = SamplingParams(0.0, 1.0, None, 8, (2,), (), 0)


def make_validator(
    generator: FakeGenerator, environment: EchoEnvironment, clock: FakeClock, prompts: int, samples: int
) -> Validator:
    runner = GroupRunner(
        generator,
        {"echo": environment},
        GREEDY,
        plain_conversations(),
        RunnerLimits(1, 64, 50.0, 5.0),
        clock,
        Unscored(),
    )
    return Validator(
        HeldOut([make_prompt(index) for index in range(prompts)], Skipped(overlong=3, faulty=2)),
        samples,
        lambda name: RolloutManager(runner, RolloutFailureConfig(), 2, 1, name, clock, Movement()),
        clock,
    )


async def test_the_accuracy_is_over_exactly_the_samples_asked_for() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda _: 1.0)
    environment = EchoEnvironment(reward=lambda index: 1.0 if index == 0 else 0.0)
    report = await clock.run(make_validator(generator, environment, clock, prompts=7, samples=4).run(step=3))
    assert report.metrics["accuracy"] == 0.25
    assert report.metrics["num_samples"] == 28.0
    assert report.metrics["num_failed"] == 0.0
    assert (report.metrics["num_skipped_prompts"], report.metrics["num_faulty_prompts"]) == (3.0, 2.0)
    assert report.metrics["pass_at_k"] == 1.0
    assert report.metrics["avg_length"] == 2.0
    assert len(generator.requests) == 28
    assert all(request.params.temperature == 0.0 for request in generator.requests)
    assert all(request.request_id.startswith("val3-") for request in generator.requests)


async def test_failed_samples_are_counted_and_not_left_out_of_the_mean() -> None:
    clock = FakeClock()
    generator = FakeGenerator(
        clock, failure=lambda request: DataError("bad") if request.startswith("val0-1.") else None
    )
    environment = EchoEnvironment(
        reward=lambda _: 1.0, status=lambda i: RolloutStatus.REWARD_TIMEOUT if i == 1 else RolloutStatus.OK
    )
    report = await clock.run(make_validator(generator, environment, clock, prompts=2, samples=2).run(step=0))
    assert report.metrics["accuracy"] == 0.25
    assert report.metrics["num_failed"] == 3.0
    assert report.metrics["num_dropped_prompts"] == 1.0


def test_a_sample_that_no_engine_could_make_counts_as_asked_for_and_as_failed() -> None:
    group = make_group(0, [make_rollout([((1,), make_completion([2, 3, 4]))], reward=0.5)])
    metrics = validation_metrics([group], asked=4, num_generations=2)
    assert (metrics["accuracy"], metrics["num_samples"], metrics["num_failed"]) == (0.125, 4.0, 3.0)
    assert (metrics["pass_at_k"], metrics["avg_length"], metrics["truncation_rate"]) == (0.5, 3.0, 0.0)


def test_the_accuracy_is_the_mean_raw_reward_whatever_its_range() -> None:
    rollouts = [make_rollout([((1,), make_completion([2]))], reward=reward) for reward in (-1.0, 3.0)]
    metrics = validation_metrics([make_group(0, rollouts)], asked=2, num_generations=1)
    assert metrics["accuracy"] == 1.0
    assert "pass_at_k" not in metrics
