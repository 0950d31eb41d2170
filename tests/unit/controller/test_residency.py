"""The order in which trainer and generators take turns on one device, and what is counted."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.controller.activity import Activity
from rl.controller.phases import RESIDENCY, TOTAL, Phases
from rl.controller.residency import Dedicated, Residency, Shared
from rl.controller.step import StepParts, StepReport, TrainStep
from rl.controller.stop import StopSignal
from rl.core.batch import TrainBatch
from rl.core.errors import InfraError
from rl.core.metric_registry import check_metric_names
from rl.core.types import Rollout
from rl.rollout.buffer import ReplayBuffer
from rl.rollout.sampler import InOrder
from rl.trainer.policy import TrainResult
from rl.weights.config import RefitConfig
from rl.weights.report import RefitError, SyncReport
from rl.weights.sync import WeightSync
from tests.support.clock import FakeClock
from tests.support.fakes import FakeAlgorithm, FakePolicy
from tests.support.policies import make_batch, make_policy, make_request, make_settings
from tests.support.refit_fakes import FakeFleet, FakeSender, never
from tests.support.rollouts import make_completion, make_group, make_rollout
from tests.support.tiny_model import make_tiny_model
from tests.support.virtual_loop import virtually

MIB = 2**20
LOSS = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)
NAMES = {"weights": "generator_weights", "kv_cache": "generator_cache"}


class Device:
    """One device that has room for a trainer or a generator, and for both models' weights; a move takes a second."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.held = {"trainer", "generator_weights", "generator_cache"}
        self.events: list[str] = []
        self.fail_at: dict[str, int] = {}
        self.hang_at: str | None = None

    def note(self, event: str) -> None:
        self.events.append(event)
        if self.fail_at.get(event, 0) > 0:
            self.fail_at[event] -= 1
            raise InfraError(f"{event} failed")

    async def offload(self) -> int:
        return await self.change("offload", set(), {"trainer"}, 6)

    async def reload(self) -> int:
        assert "generator_cache" not in self.held and "generator_weights" not in self.held, "there is no room"
        return await self.change("reload", {"trainer"}, set(), 6)

    async def sleep(self) -> int:
        return await self.change("sleep", set(), set(NAMES.values()), 5)

    async def wake(self, tags: Sequence[str]) -> int:
        assert "trainer" not in self.held, "there is no room"
        return await self.change(f"wake {','.join(tags)}", {NAMES[tag] for tag in tags}, set(), 2)

    async def change(self, event: str, more: set[str], less: set[str], mib: int) -> int:
        self.note(event)
        if event == self.hang_at:
            await never()
        self.clock.advance(1.0)
        self.held = self.held - less | more
        return mib * MIB


class SharingPolicy(FakePolicy):
    """A trainer on the device."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.clock)
        self.device = device
        self.offload, self.reload = device.offload, device.reload

    async def train(self, batch: TrainBatch, loss: Any) -> TrainResult:
        self.device.note("train")
        assert "trainer" in self.device.held
        self.version += 1
        return TrainResult(self.version, {"loss": 0.5})


class SharingFleet(FakeFleet):
    """A generator on the device; it cannot generate, nor take weights, while what that needs is asleep."""

    def __init__(self, device: Device, sender: FakeSender, replicas: int = 2) -> None:
        super().__init__(sender, replicas)
        self.device = device
        self.sleep, self.wake = device.sleep, device.wake
        for replica in self.replicas:
            replica.at = self.receiving

    def receiving(self, phase: str) -> None:
        if phase in ("pause", "start", "finish", "resume"):
            self.device.note(phase)
        if phase in ("start", "finish"):
            assert "generator_weights" in self.device.held
        if phase == "resume":
            assert set(NAMES.values()) <= self.device.held


class NotingCheck:
    """Sees when the proof begins."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def begin(self, report: SyncReport) -> None:
        self.device.note("probe")

    async def end(self) -> dict[str, float]:
        return {}


class Scene:
    """A step over a real refit, between fakes that share a device."""

    def __init__(self, shared: bool = True, timeout_s: float = 20.0) -> None:
        self.device = Device(FakeClock())
        clock, sender = self.device.clock, FakeSender()
        self.phases = Phases(clock, lambda _: None)
        self.fleet = SharingFleet(self.device, sender)
        policy = SharingPolicy(self.device)
        trainer, generator = cast(Any, policy), cast(Any, self.fleet)
        self.residency: Residency = Shared(trainer, generator, self.phases, clock) if shared else Dedicated()
        config = RefitConfig(pause_mode="keep", timeout_s=timeout_s)
        self.sync = WeightSync(cast(Any, sender), generator, config, "tdm-test", clock)
        self.buffer = ReplayBuffer(InOrder(0), 1, 1, 0)
        parts = StepParts(
            self.buffer,
            1,
            self.residency,
            FakeAlgorithm(),
            {"policy": policy},
            self.sync,
            cast(Any, NotingCheck(self.device)),
            Activity(clock),
            Activity(clock),
            0.01,
        )
        self.step = TrainStep(parts, self.phases, StopSignal())

    async def begin(self) -> None:
        """What the controller does before the first step."""
        await self.sync.connect()
        await self.step.publish(0)
        self.phases.drain()

    def rollout(self, number: int) -> Rollout:
        return make_rollout([([1, 2], make_completion([5, 6], version=number - 1))], 1.0, rollout_id=f"r{number}")

    async def run(self, number: int) -> StepReport:
        await self.buffer.put(await self.buffer.reserve(), make_group(number, [self.rollout(number)]))
        async with asyncio.timeout(60):
            return await self.step(number)


PUBLISH = [
    "offload", "wake weights", "pause", "pause", "start", "start", "finish", "finish", "wake kv_cache", "resume",
    "resume", "probe",
]  # fmt: skip


async def test_every_step_hands_the_device_over_and_back_in_the_same_order_and_so_does_the_start() -> None:
    scene = Scene()
    await scene.begin()
    assert scene.device.events == PUBLISH, "moments may come from a checkpoint"
    for number in (1, 2):
        scene.device.events.clear()
        report = await scene.run(number)
        assert scene.device.events == ["sleep", "reload", "train", *PUBLISH]
        moved = {name: value for name, value in report.metrics.items() if name.startswith("residency/")}
        assert moved == {
            "residency/generator_out_mib": 5.0, "residency/generator_out_s": 1.0,
            "residency/trainer_in_mib": 6.0, "residency/trainer_in_s": 1.0,
            "residency/trainer_out_mib": 6.0, "residency/trainer_out_s": 1.0,
            "residency/generator_in_mib": 4.0, "residency/generator_in_s": 2.0,
        }  # fmt: skip
        seconds = {n.removeprefix("timing/train/"): v for n, v in report.metrics.items() if n.startswith("timing/")}
        assert seconds[RESIDENCY] == 4.0 and seconds["weight_sync"] == 1.0
        assert sum(seconds.values()) - seconds[TOTAL] == seconds[TOTAL]
        assert report.metrics["refit/commit_s"] == 1.0
        check_metric_names(report.metrics)
    assert not scene.fleet.is_paused


async def test_with_devices_of_their_own_nothing_moves_and_nothing_is_said_of_it() -> None:
    scene = Scene(shared=False)
    scene.device.held = set(NAMES.values()) | {"trainer"}
    await scene.begin()
    report = await scene.run(1)
    moves = {"sleep", "reload", "offload", "wake weights", "wake kv_cache"}
    assert moves.isdisjoint(scene.device.events)
    assert not [name for name in report.metrics if "residency" in name]


@pytest.mark.parametrize("event", ["sleep", "reload", "train", "offload", "wake weights"])
async def test_after_a_failure_nothing_moves_any_more_and_nothing_is_published(event: str) -> None:
    scene = Scene()
    await scene.begin()
    scene.device.events.clear()
    scene.device.fail_at[event] = 1
    with pytest.raises(InfraError, match=f"{event} failed"):
        await scene.run(1)
    assert scene.device.events[-1] == event and "pause" not in scene.device.events
    assert scene.sync.version == 0


@pytest.mark.parametrize("event", ["start", "wake kv_cache"])
async def test_a_refit_that_fails_leaves_the_generators_shut_and_the_caches_where_they_are(event: str) -> None:
    scene = Scene()
    await scene.begin()
    scene.device.events.clear()
    scene.device.fail_at[event] = 100
    with pytest.raises(RefitError, match=f"{event} failed.*they stay paused") as got:
        await scene.run(1)
    assert got.value.phase == ("wake" if event == "wake kv_cache" else event)
    assert scene.fleet.is_paused and "resume" not in scene.device.events and "probe" not in scene.device.events
    assert "generator_cache" not in scene.device.held and scene.buffer.version == 0
    assert scene.device.events[-1] == event


async def test_caches_that_wake_at_the_second_try_cost_one_retry_of_the_refit() -> None:
    scene = Scene()
    await scene.begin()
    scene.device.events.clear()
    scene.device.fail_at["wake kv_cache"] = 1
    report = await scene.run(1)
    assert report.metrics["refit/attempts"] == 2.0
    again = ["start", "start", "finish", "finish", "wake kv_cache"]
    assert scene.device.events == ["sleep", "reload", "train", *PUBLISH[:4], *again, *again, *PUBLISH[-3:]]


@virtually
async def test_caches_that_never_wake_end_the_refit_at_its_deadline() -> None:
    scene = Scene(timeout_s=0.2)
    await scene.begin()
    scene.device.hang_at = "wake kv_cache"
    with pytest.raises(RefitError, match="failed at wake .*the generator: did not answer"):
        await scene.run(1)
    assert scene.fleet.is_paused


async def test_a_trainer_on_the_cpu_has_nothing_to_move_and_trains_on(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    request = make_request(model)
    moving, staying = [await make_policy(make_settings(model), request) for _ in range(2)]
    for number in range(2):
        batch = make_batch(number)
        assert await moving.reload() == 0
        expected = await staying.train(batch, LOSS)
        assert (await moving.train(batch, LOSS)).metrics == expected.metrics
        assert await moving.offload() == 0
    for policy in (moving, staying):
        await policy.close()
