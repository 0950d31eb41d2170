"""Tests of rl.controller.controller and rl.controller.step: the whole loop with fakes, in virtual time."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rl.algorithms.algorithm import Need
from rl.algorithms.config import GRPOConfig
from rl.controller.activity import Activity
from rl.controller.checkpoint import Checkpointer
from rl.controller.checkpoint_config import CheckpointingConfig
from rl.controller.controller import Controller, ControllerParts, Outcome, root_cause
from rl.controller.phases import Phases
from rl.controller.pump import RolloutPump
from rl.controller.residency import Dedicated
from rl.controller.step import StepParts, TrainStep
from rl.controller.stop import StopSignal
from rl.controller.validation import Validator
from rl.core.batch import TrainBatch
from rl.core.errors import ConfigError, FatalError, StallError, WeightSyncError
from rl.core.types import RolloutStatus
from rl.data.prompts import HeldOut, Skipped
from rl.generation.generator import SamplingParams
from rl.rollout.buffer import ReplayBuffer
from rl.rollout.config import RolloutFailureConfig, StallWatchdogConfig
from rl.rollout.manager import RolloutManager
from rl.rollout.movement import Movement
from rl.rollout.runner import GroupRunner, RunnerLimits
from rl.rollout.sampler import InOrder
from rl.rollout.unscored import Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import (
    EchoEnvironment,
    FakeAlgorithm,
    FakeGenerator,
    FakePolicy,
    FakePromptSource,
    FakeRefitCheck,
    FakeReporter,
    FakeWeightSync,
    make_prompt,
    plain_conversations,
)

SAMPLING = SamplingParams(1.0, 1.0, None, 8, (2,), (), 0)


@dataclass
class World:
    """A controller and the fakes around it."""

    clock: FakeClock
    controller: Controller
    generator: FakeGenerator
    policy: FakePolicy
    sync: FakeWeightSync
    check: FakeRefitCheck
    source: FakePromptSource
    reporter: FakeReporter
    stop: StopSignal
    checkpointer: Checkpointer

    async def run(self) -> Outcome:
        return await self.clock.run(self.controller.run())


def build(
    folder: Path,
    lookahead: int = 0,
    generator: FakeGenerator | None = None,
    clock: FakeClock | None = None,
    environment: EchoEnvironment | None = None,
    needs: frozenset[Need] = frozenset(),
    max_inflight: int = 8,
    metric_name: str | None = None,
    **grpo: Any,
) -> World:
    clock = clock or FakeClock()
    generator = generator or FakeGenerator(clock, latency=lambda _: 1.0)
    policy, sync, source = FakePolicy(clock), FakeWeightSync(generator), FakePromptSource()
    reporter, stop, phases = FakeReporter(), StopSignal(), Phases(clock, lambda _: None)
    buffer = ReplayBuffer(InOrder(lookahead), 2, 2 * (lookahead + 1), 1)
    envs = {"echo": environment or EchoEnvironment()}
    runner = GroupRunner(
        generator, envs, SAMPLING, plain_conversations(), RunnerLimits(1, 64, 1e6, 5.0), clock, Unscored()
    )

    movement = Movement()

    def manager(name: str) -> RolloutManager:
        return RolloutManager(runner, RolloutFailureConfig(), max_inflight, 1, name, clock, movement)

    training = manager("train")
    generating, models = Activity(clock), {"policy": policy}
    pump = RolloutPump(buffer, source, training, 3, generating)
    check = FakeRefitCheck()
    sync_, check_ = cast(Any, sync), cast(Any, check)
    step_parts = StepParts(
        buffer, 2, Dedicated(), FakeAlgorithm(needs), models, sync_, check_, generating, Activity(clock), 0.01
    )
    checkpointing = CheckpointingConfig(save_period=2, metric_name=metric_name)
    checkpointer = Checkpointer(folder, checkpointing, "")
    parts = ControllerParts(
        policy=policy,
        refit_check=check_,
        prompts=cast(Any, source),
        buffer=buffer,
        manager=training,
        movement=movement,
        pump=pump,
        step=TrainStep(step_parts, phases, stop),
        validator=Validator(HeldOut([make_prompt(90), make_prompt(91)], Skipped()), 1, manager, clock),
        checkpointer=checkpointer,
        phases=phases,
        stop=stop,
        reporter=reporter,
        call_timeout_s=5000.0,
        max_unscored_steps=3,
    )
    config = GRPOConfig.model_validate({"max_num_steps": 4, "val_period": 0, **grpo})
    watchdog = StallWatchdogConfig(interval_s=10.0, stall_timeout_s=100.0)
    controller = Controller(parts, config, checkpointing, watchdog, clock)
    return World(clock, controller, generator, policy, sync, check, source, reporter, stop, checkpointer)


async def test_a_scorer_that_scores_nothing_ends_the_run_after_a_few_steps(tmp_path: Path) -> None:
    broken = EchoEnvironment(status=lambda _: RolloutStatus.REWARD_ERROR)
    world = build(tmp_path, environment=broken)
    with pytest.raises(FatalError, match="no rollout of the last 3 steps has a valid reward"):
        await world.run()
    assert world.reporter.events == ["step 1", "step 2", "step 3"]


async def test_a_step_without_rewards_between_others_does_not_end_it(tmp_path: Path) -> None:
    calls = iter(range(100))
    failing = {2, 3, 4, 5}  # the groups of steps 2 and 3
    status = {True: RolloutStatus.REWARD_TIMEOUT, False: RolloutStatus.OK}
    environment = EchoEnvironment(status=lambda _: status[next(calls) // 6 in failing])
    assert await build(tmp_path, environment=environment).run() == Outcome(4, finished=True)


async def test_every_step_trains_publishes_and_is_logged_before_it_is_saved(tmp_path: Path) -> None:
    world = build(tmp_path)
    assert await world.run() == Outcome(4, finished=True)
    assert world.sync.published == [0, 1, 2, 3, 4]
    assert world.reporter.events == ["step 1", "step 2", "step 3", "step 4"]
    assert [checkpoint.name for checkpoint in sorted(tmp_path.iterdir())] == ["step_2", "step_4"]
    assert list(world.reporter.saved_seconds) == [2, 4]
    assert "timing/train/checkpointing" not in world.reporter.metrics[3]
    assert [sorted(set(batch.group_ids.tolist())) for batch in world.policy.batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    metrics = world.reporter.metrics[2]
    assert metrics["train/loss"] == 0.5
    assert metrics["train/reward"] == 1.0
    assert metrics["train/staleness_max"] == 0.0
    assert metrics["timing/train/policy_training"] == 1.0
    assert metrics["timing/train/exposed_generation"] == 1.0
    assert metrics["performance/overlap_s"] == 0.0
    assert metrics["refit/mib"] == 1.0


async def test_a_lookahead_overlaps_generation_with_training(tmp_path: Path) -> None:
    world = build(tmp_path, lookahead=1)
    await world.run()
    lag = [world.reporter.metrics[step]["train/staleness_max"] for step in (1, 2, 3, 4)]
    assert lag == [0.0, 1.0, 1.0, 1.0]
    assert sum(world.reporter.metrics[step]["performance/overlap_s"] for step in (1, 2, 3, 4)) > 0.0


async def test_only_the_needed_logprobs_are_computed(tmp_path: Path) -> None:
    plain = build(tmp_path / "plain", max_num_steps=1)
    await plain.run()
    assert plain.policy.scored == []
    both = build(tmp_path / "both", max_num_steps=1, needs=frozenset({Need.PREV, Need.REFERENCE}))
    await both.run()
    assert both.policy.scored == ["policy", "reference"]
    assert both.policy.batches[0].prev_logprobs is not None


async def test_validation_runs_at_the_start_each_period_and_the_end(tmp_path: Path) -> None:
    world = build(tmp_path, val_at_start=True, val_period=3, val_at_end=True)
    await world.run()
    assert world.reporter.events == [
        "validation 0", "step 1", "step 2", "step 3", "validation 3", "step 4", "validation 4",
    ]  # fmt: skip


async def test_no_training_group_starts_while_a_synchronous_run_validates(tmp_path: Path) -> None:
    world = build(tmp_path, val_at_start=True, val_period=1, max_num_steps=2)
    await world.run()
    order = [request.request_id.split("-")[0] for request in world.generator.requests]
    assert order == ["val0"] * 2 + ["train"] * 6 + ["val1"] * 2 + ["train"] * 6 + ["val2"] * 2


async def test_a_resumed_run_goes_on_with_the_next_prompt_and_the_same_seeds(tmp_path: Path) -> None:
    straight = build(tmp_path / "straight", lookahead=1)
    await straight.run()
    first = build(tmp_path / "resumed", lookahead=1, max_num_steps=2)
    await first.run()
    second = build(tmp_path / "resumed", lookahead=1)
    checkpoint = second.checkpointer.latest()
    assert checkpoint is not None
    await second.controller.restore(checkpoint)
    assert await second.run() == Outcome(4, finished=True)
    assert second.reporter.events == ["step 3", "step 4"]
    assert second.sync.published[0] == 2
    expected = {r.request_id: r.params.seed for r in straight.generator.requests}
    resumed = {r.request_id: r.params.seed for r in first.generator.requests + second.generator.requests}
    assert resumed == expected
    assert second.source.position == straight.source.position


async def test_a_stop_between_steps_saves_what_is_done(tmp_path: Path) -> None:
    world = build(tmp_path)
    world.reporter.on_step = lambda step: world.stop.request() if step == 3 else None
    assert await world.run() == Outcome(3, finished=False)
    assert world.reporter.events[-2:] == ["step 3", "saving step 3"]
    assert [checkpoint.name for checkpoint in sorted(tmp_path.iterdir())] == ["step_2", "step_3"]


async def test_a_stop_during_generation_does_not_wait_for_it(tmp_path: Path) -> None:
    clock = FakeClock()
    world = build(tmp_path, clock=clock, generator=FakeGenerator(clock, latency=lambda _: 1e5))

    async def stop_soon() -> None:
        await clock.sleep(50.0)
        world.stop.request()

    stopper = asyncio.ensure_future(stop_soon())
    assert await world.run() == Outcome(0, finished=False)
    await stopper
    assert clock.now() == 50.0


async def stop_late(world: World, at: float) -> list[str]:
    """Ask for a stop, enforce it 10 s later, and return the step folders."""
    task = asyncio.ensure_future(world.controller.run())

    async def stop() -> None:
        await world.clock.sleep(at)
        world.stop.request()
        await world.clock.sleep(10.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await world.clock.run(stop())
    assert task.cancelled()
    return sorted(path.name for path in world.checkpointer.folder.iterdir())


async def test_an_enforced_stop_saves_the_steps_that_are_done(tmp_path: Path) -> None:
    world = build(tmp_path, needs=frozenset({Need.PREV}))

    async def slow(batch: TrainBatch) -> torch.Tensor:
        await world.clock.sleep(1000.0 if world.policy.version == 1 else 0.0)
        return torch.zeros(batch.num_tokens)

    world.policy.logprobs = slow  # type: ignore[method-assign]
    assert await stop_late(world, 20.0) == ["step_1"]
    assert world.reporter.events == [
        "step 1",
        "policy_and_reference_logprobs after step 1 did not end in time; it is abandoned",
    ]
    resumed = build(tmp_path)
    checkpoint = resumed.checkpointer.latest()
    assert checkpoint is not None
    await resumed.controller.restore(checkpoint)
    assert await resumed.run() == Outcome(4, finished=True)
    trained = [world.policy.batches[0], *resumed.policy.batches]
    assert [sorted(set(batch.group_ids.tolist())) for batch in trained] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert resumed.source.position == 8


async def test_an_enforced_stop_during_training_says_what_is_lost(tmp_path: Path) -> None:
    world = build(tmp_path)
    world.reporter.on_step = lambda _: setattr(world.policy, "_seconds", 1000.0)
    assert await stop_late(world, 20.0) == []
    assert world.reporter.events[-1] == (
        "steps 1 to 1 are in no checkpoint and will be done again: the model may have changed during policy_training"
    )


async def test_the_first_cause_of_a_failure_is_what_the_run_raises(tmp_path: Path) -> None:
    training = build(tmp_path / "a")
    training.policy.fail = ValueError("loss is not a number")
    with pytest.raises(ValueError, match="loss is not a number"):
        await training.run()
    refit = build(tmp_path / "b")
    refit.sync.fail_at = 2
    with pytest.raises(WeightSyncError, match="version 2"):
        await refit.run()
    assert refit.controller.step == 1
    probe = build(tmp_path / "d")
    probe.check.fail_at = 1
    with pytest.raises(FatalError, match="the probe of version 1 failed"):
        await probe.run()
    assert probe.controller.step == 1 and probe.check.seen == [0, 1], "nothing is trained on what they sampled"
    last = build(tmp_path / "e")
    last.check.fail_at = 4
    with pytest.raises(FatalError, match="the probe of version 4 failed"):
        await last.run()
    clock = FakeClock()
    broken = FakeGenerator(clock, failure=lambda _: FatalError("no engine left"))
    with pytest.raises(FatalError, match="no engine left"):
        await build(tmp_path / "c", clock=clock, generator=broken).run()


async def test_a_generator_that_never_answers_ends_as_a_stall_that_names_the_wait(tmp_path: Path) -> None:
    clock = FakeClock()
    world = build(tmp_path, clock=clock, generator=FakeGenerator(clock, latency=lambda _: 1e5))
    with pytest.raises(StallError, match=r"exposed_generation in step 1 \(2 groups in flight, 0 ready"):
        await world.run()
    assert clock.now() == 110.0


async def test_a_validation_that_is_longer_than_the_stall_timeout_is_no_stall(tmp_path: Path) -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda name: 60.0 if name.startswith("val") else 1.0)
    world = build(tmp_path, clock=clock, generator=generator, val_at_start=True, max_num_steps=1, max_inflight=1)
    assert (await world.run()).finished
    assert clock.now() > 120.0


async def test_a_long_training_phase_is_no_stall(tmp_path: Path) -> None:
    clock = FakeClock()
    world = build(tmp_path, clock=clock, max_num_steps=1)
    world.policy._seconds = 1000.0
    assert (await world.run()).finished


async def test_a_step_without_a_valid_reward_is_logged_and_the_run_goes_on(tmp_path: Path) -> None:
    environment = EchoEnvironment(status=lambda _: RolloutStatus.REWARD_ERROR)
    world = build(tmp_path, environment=environment, max_num_steps=2)
    assert (await world.run()).finished
    assert world.reporter.metrics[1]["train/num_reward_errors"] == 6.0
    assert "train/reward" not in world.reporter.metrics[1]


async def test_a_training_that_skips_a_version_is_fatal(tmp_path: Path) -> None:
    world = build(tmp_path)
    world.policy.version = 5
    with pytest.raises(FatalError, match="made version 6 out of 0"):
        await world.run()


async def test_a_misspelt_training_metric_ends_the_run_after_its_first_step(tmp_path: Path) -> None:
    world = build(tmp_path, metric_name="train:rewards")
    with pytest.raises(ConfigError, match="train:rewards is not among the metrics: .*did you mean train:reward"):
        await world.run()
    assert world.controller.step == 1


async def test_a_checkpoint_that_disagrees_with_itself_is_refused(tmp_path: Path) -> None:
    world = build(tmp_path, max_num_steps=2)
    await world.run()
    (tmp_path / "step_2" / "policy" / "version.txt").write_text("7")
    checkpoint = world.checkpointer.latest()
    assert checkpoint is not None
    with pytest.raises(FatalError, match="policy version 7"):
        await build(tmp_path).controller.restore(checkpoint)


def test_the_root_cause_is_the_first_fatal_error_else_the_first() -> None:
    inner = ExceptionGroup("inner", [ValueError("a"), ConfigError("b")])
    assert str(root_cause(ExceptionGroup("outer", [OSError("c"), inner]))) == "b"
    assert str(root_cause(ExceptionGroup("outer", [OSError("c"), ValueError("a")]))) == "c"
