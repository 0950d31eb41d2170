"""The order in which trainer and generators take turns on one device, and what is counted."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.controller.residency import Dedicated, Residency, Shared
from tests.support.clock import FakeClock
from tests.support.policies import make_batch, make_policy, make_request, make_settings
from tests.support.tiny_model import make_tiny_model

MIB = 2**20
LOSS = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)


class Device:
    """Both sides of one device that has room for a trainer or a generator, and for both models' weights."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.held = {"trainer", "generator_weights", "generator_cache"}
        self.events: list[str] = []

    async def offload(self) -> int:
        return await self._change("offload", set(), {"trainer"}, 6)

    async def reload(self) -> int:
        assert "generator_cache" not in self.held and "generator_weights" not in self.held, "there is no room"
        return await self._change("reload", {"trainer"}, set(), 6)

    async def sleep(self) -> int:
        return await self._change("sleep", set(), {"generator_weights", "generator_cache"}, 5)

    async def wake(self, tags: Sequence[str]) -> int:
        assert "trainer" not in self.held, "there is no room"
        names = {"weights": "generator_weights", "kv_cache": "generator_cache"}
        return await self._change(f"wake {','.join(tags)}", {names[tag] for tag in tags}, set(), 2)

    async def _change(self, event: str, more: set[str], less: set[str], mib: int) -> int:
        await asyncio.sleep(0)
        self.events.append(event)
        self.held = self.held - less | more
        return mib * MIB


async def step(residency: Residency, device: Device) -> None:
    async with residency.training():
        device.events.append("train")
    async with residency.refit():
        device.events.append("publish")


async def test_every_step_hands_the_device_over_and_back_in_the_same_order() -> None:
    device = Device(FakeClock())
    residency = Shared(device, device, device.clock)
    for _ in range(2):
        await step(residency, device)
        assert device.held == {"generator_weights", "generator_cache"}
    once = ["sleep", "reload", "train", "offload", "wake weights", "publish", "wake kv_cache"]
    assert device.events == once * 2
    moved = residency.drain()
    assert moved["generator_out_mib"] == 10 and moved["trainer_in_mib"] == 12
    assert moved["trainer_out_mib"] == 12 and moved["generator_in_mib"] == 8
    assert residency.drain() == {}


@pytest.mark.parametrize(("phase", "last"), [("train", "train"), ("publish", "publish")])
async def test_after_a_failure_nothing_moves_any_more(phase: str, last: str) -> None:
    device = Device(FakeClock())
    residency = Shared(device, device, device.clock)
    with pytest.raises(RuntimeError, match="broken"):
        async with residency.training():
            device.events.append("train")
            if phase == "train":
                raise RuntimeError("broken")
        async with residency.refit():
            device.events.append("publish")
            raise RuntimeError("broken")
    assert device.events[-1] == last, "the generators' caches stay away while their weights are in doubt"


async def test_with_devices_of_their_own_nothing_moves() -> None:
    device = Device(FakeClock())
    await step(Dedicated(), device)
    assert device.events == ["train", "publish"]


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
