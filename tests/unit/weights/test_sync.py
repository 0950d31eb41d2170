"""The refit transaction: all replicas or none, errors that say where, and a retry that starts clean."""

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from rl.core.clock import SystemClock
from rl.core.errors import InfraError, WeightSyncError
from rl.core.reaper import SHARED_MEMORY
from rl.core.types import PolicyVersion
from rl.weights.config import RefitConfig
from rl.weights.receiver import WeightReceiver
from rl.weights.sender import WeightSender
from rl.weights.sync import WeightSync
from rl.weights.transport import Ack, ReceiverHandle, TensorSpec, TransferInfo

Hook = Callable[[str, int], None]


async def never() -> None:
    await asyncio.Event().wait()


class Sender:
    """A SenderHandle in this process; `at(phase, bucket)` may raise."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.worker = WeightSender(lambda: tensors)
        self.at: Hook = lambda phase, bucket: None
        self.hang_at: int | None = None

    async def manifest(self) -> tuple[TensorSpec, ...]:
        return self.worker.manifest()

    async def open(self, info: TransferInfo) -> None:
        self.worker.open(info)

    async def start(self, version: PolicyVersion) -> None:
        self.at("start", -1)
        self.worker.start(version)

    async def pack(self, bucket: int) -> None:
        self.at("pack", bucket)
        if bucket == self.hang_at:
            await never()
        self.worker.pack(bucket)

    async def finish(self) -> str:
        self.at("finish", -1)
        return self.worker.finish()

    async def close(self) -> None:
        self.worker.close()


class Replica:
    """A ReceiverHandle in this process."""

    def __init__(self, name: str) -> None:
        self.replica = name
        self.tensors: dict[str, torch.Tensor] = {}
        self.worker = WeightReceiver(lambda new: self.tensors.update(new), keeps_tensors=True)
        self.version = -1
        self.at: Hook = lambda phase, bucket: None
        self.hang_at: int | None = None
        self.change_ack: Callable[[Ack], Ack] = lambda ack: ack

    async def init(self, info: TransferInfo) -> None:
        self.worker.init(info)

    async def start(self, version: PolicyVersion) -> None:
        self.at("start", -1)
        self.worker.start()

    async def update(self, bucket: int) -> None:
        self.at("update", bucket)
        if bucket == self.hang_at:
            await never()
        self.worker.update(bucket)

    async def finish(self, version: PolicyVersion) -> Ack:
        self.at("finish", -1)
        received = self.worker.finish()
        self.version = version
        return self.change_ack(Ack(self.replica, version, received.num_tensors, received.checksum))


class Fleet:
    """A generator that only knows whether it is paused."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.paused = False
        self.modes: list[str] = []

    async def pause(self, mode: Literal["drain", "keep", "abort"]) -> None:
        self.paused = True
        self.modes.append(mode)

    async def resume(self) -> None:
        self.paused = False

    def weight_receivers(self) -> list[ReceiverHandle]:
        return list(self.replicas)


class Scene:
    """One sender, some replicas, the transaction between them."""

    def __init__(self, replicas: int = 2, timeout_s: float = 20.0) -> None:
        torch.manual_seed(0)
        self.tensors = {f"layer.{i}": torch.randn(100) for i in range(6)}
        self.sender = Sender(self.tensors)
        self.fleet = Fleet([Replica(f"generation[{rank}]") for rank in range(replicas)])
        config = RefitConfig(bucket_mib=1024 / (1 << 20), timeout_s=timeout_s, pause_mode="keep")
        self.tag = f"tdm-test-{secrets.token_hex(4)}"
        self.sync = WeightSync(self.sender, self.fleet, config, self.tag, SystemClock())

    def train(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1.0)

    def assert_loaded(self, version: int) -> None:
        assert not self.fleet.paused
        for replica in self.fleet.replicas:
            assert replica.version == version
            assert all(torch.equal(replica.tensors[name], tensor) for name, tensor in self.tensors.items())

    async def assert_retry_works(self, version: int) -> None:
        """The failure left everything paused; without its cause the same call succeeds in full."""
        assert self.fleet.paused
        self.sender.at, self.sender.hang_at = (lambda phase, bucket: None), None
        for replica in self.fleet.replicas:
            replica.at, replica.hang_at, replica.change_ack = (lambda phase, bucket: None), None, (lambda ack: ack)
        self.train()
        await self.sync.publish(version)
        self.assert_loaded(version)
        await self.close()

    async def close(self) -> None:
        await self.sync.close()
        assert not list(SHARED_MEMORY.glob(f"{self.tag}*"))


async def test_every_replica_gets_every_version_and_the_report_says_what_moved() -> None:
    scene = Scene()
    await scene.sync.connect()
    assert len(list(SHARED_MEMORY.glob(f"{scene.tag}*"))) == 1
    for version in range(3):
        report = await scene.sync.publish(version)
        scene.assert_loaded(version)
        assert (report.version, report.bytes, report.tensors, report.replicas) == (version, 2400, 6, 2)
        assert report.seconds > 0
        scene.train()
    assert scene.fleet.modes == ["keep"] * 3
    await scene.close()


async def test_packing_a_bucket_overlaps_loading_the_one_before() -> None:
    scene = Scene(replicas=1)
    events: list[str] = []
    scene.sender.at = lambda phase, bucket: events.append(f"{phase} {bucket}")
    await scene.sync.connect()
    plan = scene.sync._plan
    assert plan is not None and len(plan.buckets) == 3
    packed = asyncio.Event()

    async def update_after_the_next_pack(bucket: int) -> None:
        events.append(f"update {bucket}")
        if bucket == 0:
            await asyncio.wait_for(packed.wait(), 10)
        scene.fleet.replicas[0].worker.update(bucket)

    async def pack(bucket: int) -> None:
        scene.sender.worker.pack(bucket)
        if bucket == 1:
            packed.set()

    scene.fleet.replicas[0].update = update_after_the_next_pack  # type: ignore[method-assign]
    scene.sender.pack = pack  # type: ignore[method-assign]
    await scene.sync.publish(0)
    scene.assert_loaded(0)
    await scene.close()


@pytest.mark.parametrize(("phase", "bucket"), [("start", -1), ("update", 0), ("update", 2), ("finish", -1)])
async def test_a_failing_replica_is_named_with_its_phase_and_nobody_generates(phase: str, bucket: int) -> None:
    scene = Scene()
    await scene.sync.connect()

    def fail(at: str, number: int) -> None:
        if (at, number) == (phase, bucket):
            raise InfraError("the engine core died")

    scene.fleet.replicas[1].at = fail
    with pytest.raises(WeightSyncError, match=r"refit of version 4 failed: replica generation\[1\]") as caught:
        await scene.sync.publish(4)
    assert "the engine core died" in str(caught.value)
    assert phase in str(caught.value)
    if bucket >= 0:
        assert f"bucket {bucket}" in str(caught.value)
    await scene.assert_retry_works(4)


@pytest.mark.parametrize("bucket", [0, 2])
async def test_a_failing_sender_is_named_with_its_bucket(bucket: int) -> None:
    scene = Scene()
    await scene.sync.connect()

    def fail(at: str, number: int) -> None:
        if (at, number) == ("pack", bucket):
            raise RuntimeError("out of memory")

    scene.sender.at = fail
    with pytest.raises(WeightSyncError, match=f"the sender failed at packing bucket {bucket}: out of memory"):
        await scene.sync.publish(1)
    await scene.assert_retry_works(1)


async def test_a_replica_that_hangs_ends_at_the_deadline_and_is_named() -> None:
    scene = Scene(timeout_s=0.2)
    await scene.sync.connect()
    scene.fleet.replicas[0].hang_at = 1
    with pytest.raises(WeightSyncError, match=r"within 0.2 s; .*bucket 1, waiting for replica generation\[0\]\."):
        await scene.sync.publish(7)
    await scene.assert_retry_works(7)


async def test_a_sender_that_hangs_ends_at_the_deadline_and_is_named() -> None:
    scene = Scene(timeout_s=0.2)
    await scene.sync.connect()
    scene.sender.hang_at = 1
    with pytest.raises(WeightSyncError, match="packing bucket 1"):
        await scene.sync.publish(7)
    await scene.assert_retry_works(7)


async def test_a_replica_that_fails_while_the_sender_hangs_is_reported_at_once() -> None:
    scene = Scene(timeout_s=60)
    await scene.sync.connect()
    scene.sender.hang_at = 1

    def fail(at: str, number: int) -> None:
        if at == "update":
            raise InfraError("lost")

    scene.fleet.replicas[0].at = fail
    with pytest.raises(WeightSyncError, match=r"replica generation\[0\] failed at update with bucket 0: lost"):
        await asyncio.wait_for(scene.sync.publish(1), 10)
    await scene.assert_retry_works(1)


@pytest.mark.parametrize(("field", "value"), [("version", 3), ("num_tensors", 5), ("checksum", "0123456789abcdef")])
async def test_an_acknowledgement_that_differs_from_what_was_sent_is_an_error(field: str, value: object) -> None:
    scene = Scene()
    await scene.sync.connect()
    scene.fleet.replicas[1].change_ack = lambda ack: replace(ack, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match=r"replica generation\[1\] acknowledged"):
        await scene.sync.publish(4)
    await scene.assert_retry_works(5)


async def test_a_missing_acknowledgement_is_an_error() -> None:
    scene = Scene()
    await scene.sync.connect()
    scene.fleet.replicas[0].change_ack = lambda ack: None  # type: ignore[arg-type,return-value]
    with pytest.raises(WeightSyncError):
        await scene.sync.publish(4)
    await scene.assert_retry_works(4)


async def test_a_generator_without_replicas_cannot_be_refitted() -> None:
    scene = Scene(replicas=0)
    with pytest.raises(WeightSyncError, match="no replica"):
        await scene.sync.connect()
    with pytest.raises(WeightSyncError, match="before connect"):
        await scene.sync.publish(0)


async def test_a_pause_that_never_ends_is_named() -> None:
    scene = Scene(timeout_s=0.1)
    await scene.sync.connect()

    async def pause(mode: Literal["drain", "keep", "abort"]) -> None:
        await never()

    scene.fleet.pause = pause  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"pausing the generator \(keep\)"):
        await scene.sync.publish(0)
    await scene.close()


async def test_a_cancelled_refit_stays_cancelled_and_leaves_the_generator_paused() -> None:
    scene = Scene()
    await scene.sync.connect()
    scene.fleet.replicas[0].hang_at = 0
    task = asyncio.ensure_future(scene.sync.publish(1))
    while not scene.fleet.paused:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await scene.assert_retry_works(1)


async def test_two_hundred_refits_leave_no_segment_and_no_descriptor() -> None:
    scene = Scene(replicas=1)
    await scene.sync.connect()
    await scene.sync.publish(0)
    before = len(os.listdir("/proc/self/fd"))
    for version in range(1, 201):
        await scene.sync.publish(version)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(list(SHARED_MEMORY.glob(f"{scene.tag}*"))) == 1
    await scene.close()
