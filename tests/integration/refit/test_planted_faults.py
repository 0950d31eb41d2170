"""Twelve planted faults, in real generator workers in processes of their own: each is named, and the next refit works.

The workers are the product's (`rl.generation.hf`) over Ray, the trainer is the product's policy. What each fault leads
to stands in the table that the last test prints.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.core.errors import FatalError, WeightSyncError
from rl.core.resources import RunResources
from rl.trainer.policy import start_policy
from rl.weights.report import RefitError, SyncReport
from rl.weights.transport import RefitStart
from tests.support.policies import make_request, make_settings, worker_of
from tests.support.refit_faults import (
    STALE,
    SWAPPED,
    TRUNCATED,
    WRONG_DTYPE,
    FaultyHfWorker,
    square_tensor,
    table,
)
from tests.support.refit_world import BUCKET_MIB, TIMEOUT_S, World, start_engines, started
from tests.support.tiny_model import make_tiny_model

SHORT_TIMEOUT_S = 3.0
ROWS: list[tuple[str, str, str, str]] = [("fault", "detected after", "named", "state afterwards")]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests of this module: engines and links outlive a test."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scene = started(tmp_path_factory.mktemp("faults"))
    made = loop.run(scene.__aenter__())
    loop.run(made.connect())
    loop.run(made.publish())
    yield made
    loop.run(scene.__aexit__(None, None, None))


async def failure_of(work: Any) -> tuple[BaseException, float]:
    """What `work` raises, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises((WeightSyncError, FatalError)) as caught:
        await work
    return caught.value, time.monotonic() - start


async def state_of(world: World) -> str:
    """Whether anybody could have sampled since: the engines stay shut after a refit that failed."""
    assert world.sync is not None
    return f"{world.sync.state}, shut"


def record(fault: str, error: BaseException, seconds: float, state: str, *words: str) -> None:
    """Check that the error names what it must, and keep the row."""
    text = str(error)
    missing = [word for word in words if word not in text]
    assert not missing, f"{fault}: {missing} not named in: {text}"
    ROWS.append((fault, f"{seconds:.2f} s", ", ".join(words), state))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stale layer", ("generation[1]", STALE, "layer 1", "stale, the bytes are those of version")),
        ("swapped names", ("generation[1]", SWAPPED[0], "layer 0", f"those of '{SWAPPED[1]}'", "swapped")),
        ("truncated bucket", ("generation[1]", TRUNCATED, "layer 1", "no other tensor's")),
    ],
)
def test_weights_that_are_not_what_was_sent(
    loop: asyncio.Runner, world: World, fault: str, words: tuple[str, ...]
) -> None:
    async def play() -> None:
        await world.plant(1, fault)
        error, seconds = await failure_of(world.publish())
        assert isinstance(error, RefitError) and error.end == "generation[1]"
        state = await state_of(world)
        record(fault, error, seconds, f"{state}; {await world.assert_works()}", *words)

    loop.run(asyncio.wait_for(play(), 120))


def test_a_transposed_view(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        name = square_tensor(worker_of(world.policy)._model.named_tensors())
        await world.plant(0, "transposed view")
        error, seconds = await failure_of(world.publish())
        state = await state_of(world)
        words = ("generation[0]", name, "layer 0")
        record("transposed view", error, seconds, f"{state}; {await world.assert_works()}", *words)

    loop.run(asyncio.wait_for(play(), 120))


def test_a_tensor_of_another_dtype(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        await world.plant(1, "wrong dtype")
        error, seconds = await failure_of(world.connect())
        await world.on(1, FaultyHfWorker.heal)
        await world.connect()
        words = ("generation[1]", WRONG_DTYPE, "float32", "int32")
        record("wrong dtype", error, seconds, f"not connected; {await world.assert_works()}", *words)

    loop.run(asyncio.wait_for(play(), 120))


def test_a_repeated_epoch(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        assert world.sync is not None
        await world.publish()
        epoch = world.sync._epoch
        world.sync._epoch = epoch - 3  # as a driver would have it that came back from an old state
        error, seconds = await failure_of(world.publish())
        state = await state_of(world)
        world.sync._epoch = epoch + 1
        record(
            "repeated epoch", error, seconds, f"{state}; {await world.assert_works()}", "epoch", f"{epoch} was the last"
        )

    loop.run(asyncio.wait_for(play(), 120))


def test_another_temperature(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        report = await world.publish()
        await world.plant(1, "temperature")
        error, seconds = await failure_of(world.probe(report))
        words = ("generation[1]", "weights", "agree", "temperature is 0.7 where it should be 1.0")
        record("temperature", error, seconds, f"run ends; {await world.assert_works()}", *words)

    loop.run(asyncio.wait_for(play(), 120))


def test_an_adapter_that_is_trained_but_not_sent(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        assert world.sync is not None
        await world.publish()
        layer = worker_of(world.policy)._model.module.model.layers[1].mlp.down_proj
        low, high = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
        hook = layer.register_forward_hook(lambda module, inputs, out: out + inputs[0] @ low.t() @ high.t())
        report = await world.sync.publish(world.next_version())
        error, seconds = await failure_of(world.probe(report))
        hook.remove()
        assert report.changed == 0
        words = ("generation[0]", "no tensor has changed", "adapter that is neither merged nor sent")
        record("skipped adapter", error, seconds, f"run ends; {await world.assert_works()}", *words)

    loop.run(asyncio.wait_for(play(), 120))


def test_a_wrong_weight_that_no_digest_sees_is_named_by_the_probe(loop: asyncio.Runner, world: World) -> None:
    """As in an engine that packs its layers: bytes arrive, and it computes with others."""

    async def play() -> None:
        report = await world.publish()
        await world.on(0, FaultyHfWorker.spoil, STALE)
        error, _ = await failure_of(world.probe(report))
        assert f"generation[0] computes with another tensor than the trainer: '{STALE}'" in str(error)
        assert "layer 1" in str(error)
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 120))


def test_a_late_joiner(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        await world.plant(1, "late joiner")
        error, seconds = await failure_of(world.connect(SHORT_TIMEOUT_S))
        await world.on(1, FaultyHfWorker.heal)
        await world.connect()
        record("late joiner", error, seconds, f"not connected; {await world.assert_works()}", "generation[1]")
        assert seconds < 3 * SHORT_TIMEOUT_S + 10

    loop.run(asyncio.wait_for(play(), 120))


def test_an_engine_that_refuses_is_named_with_its_own_error_and_within_the_deadline(
    loop: asyncio.Runner, world: World
) -> None:
    async def play() -> None:
        await world.plant(1, "raises")
        error, seconds = await failure_of(world.publish())
        assert isinstance(error, RefitError) and (error.end, error.state) == ("generation[1]", "CLEAN")
        assert seconds < TIMEOUT_S
        state = await state_of(world)
        words = ("generation[1]", "the engine cannot be paused any longer")
        record("refusing receiver", error, seconds, f"{state}; {await world.assert_works()}", *words)

    loop.run(asyncio.wait_for(play(), 120))


def test_a_refit_of_many_buckets_is_equal_in_every_tensor(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        report = await world.publish()
        assert report.bytes > 5 * BUCKET_MIB * 2**20
        await world.assert_equal()

    loop.run(asyncio.wait_for(play(), 120))


def test_an_engine_that_generates_is_not_refitted(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        assert world.sync is not None
        handle = world.generator.weight_receivers()[0]
        from_outside = handle.start(RefitStart(1 << 40, world.version + 1, 5.0))
        with pytest.raises(WeightSyncError, match="is not paused"):
            await from_outside
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 60))


def test_a_second_commit_of_one_refit_is_refused(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        await world.publish()
        handle = world.generator.weight_receivers()[0]
        with pytest.raises(WeightSyncError, match="finish while the refit is finished"):
            await handle.finish(world.version)
        assert world.sync is not None
        with pytest.raises(WeightSyncError, match="versions only grow"):
            await world.sync.publish(world.version)
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 60))


@pytest.mark.parametrize("tied", [True, False])
def test_engines_start_from_the_checkpoint_and_follow_tied_and_untied_heads(tmp_path: Path, tied: bool) -> None:
    """Before the first refit both sides compute the same: nothing starts from random weights."""

    async def play() -> None:
        path = make_tiny_model(tmp_path / "tiny", tie_embeddings=tied, seed=5)
        with RunResources.create() as run:
            local = LocalCluster(ClusterConfig(kind="local"), run)
            try:
                policy = await start_policy(local, make_settings(path), make_request(path))
                world = World(policy, await start_engines(local, path, 1), run.tag)
                await world.connect()
                loaded = SyncReport(0, 0.0, 0, 0, 1, 0, 1, {})
                assert (await world.probe(loaded))["probe_gap"] < 1e-5
                for _ in range(2):
                    report = await world.publish()
                    assert (await world.probe(report))["probe_gap"] < 1e-5
                names = set(worker_of(policy)._model.named_tensors())
                assert ("lm_head.weight" in names) is not tied
                await world.generator.close()
            finally:
                await local.shutdown()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_refits_leave_nothing_behind(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        for _ in range(5):
            await world.publish()
        before = await world.on(0, FaultyHfWorker.resources)
        own = len(os.listdir("/proc/self/fd"))
        segments = len(list(Path("/dev/shm").glob(f"{world.run_tag}-refit-*")))
        for _ in range(30):
            await world.publish()
        after = await world.on(0, FaultyHfWorker.resources)
        assert after["descriptors"] <= before["descriptors"]
        assert after["segments"] == before["segments"]
        assert after["bytes"] - before["bytes"] < 4 * 2**20
        assert len(os.listdir("/proc/self/fd")) <= own
        assert len(list(Path("/dev/shm").glob(f"{world.run_tag}-refit-*"))) == segments

    loop.run(asyncio.wait_for(play(), 120))


def test_a_slow_receiver_and_then_a_dead_one_leave_the_fleet(
    loop: asyncio.Runner, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last: the fleet is one smaller after it. The slow one comes to itself, so the dead one is the only loss."""

    async def play() -> None:
        await world.connect(SHORT_TIMEOUT_S, min_replicas=2)
        await world.plant(1, "slow receiver")
        error, seconds = await failure_of(world.publish())
        state = await state_of(world)
        await world.on(1, FaultyHfWorker.heal)
        await world.connect(TIMEOUT_S)
        record("slow receiver", error, seconds, f"{state}; {await world.assert_works()}", "generation[1]")
        await world.plant(1, "dead receiver")
        start = time.monotonic()
        report = await world.publish()
        seconds = time.monotonic() - start
        assert (report.replicas, report.attempts, world.generator.num_replicas) == (1, 2, 1)
        assert [handle.replica for handle in world.generator.weight_receivers()] == ["generation[0]"]
        words = "generation[1] died, leaves the fleet"
        ROWS.append(
            ("dead receiver", f"{seconds:.2f} s", words, f"CLEAN, the rest go on; {await world.assert_works()}")
        )

    loop.run(asyncio.wait_for(play(), 180))
    with capsys.disabled():
        sys.stdout.write(f"\n{table(ROWS)}\n")
    assert len(ROWS) == 1 + 12
