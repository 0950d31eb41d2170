"""Whole refits over the links that a run on one host without GPUs does not take: TCP at an IPv6 address, and NCCL.

Generator workers are the product's in processes of their own. NCCL is the strict one on host memory, which refuses what
the real one would hang on; it serves as the library of the device too.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rl.core.errors import WeightSyncError
from rl.weights.report import RefitError
from rl.weights.transport import LinkSettings
from tests.support.nccl import DIALECTS, nccl_link
from tests.support.refit_faults import FaultyHfWorker
from tests.support.refit_world import BUCKET_MIB, TIMEOUT_S, World, started

SHORT_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests of this module: engines and links outlive a test."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scene = started(tmp_path_factory.mktemp("links"), num_replicas=3)
    yield loop.run(scene.__aenter__())
    loop.run(scene.__aexit__(None, None, None))


def test_refits_over_tcp_at_the_loopback_of_the_sixth_version(loop: asyncio.Runner, world: World) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"this machine has no IPv6 loopback: {error}")

    async def play() -> None:
        sync = await world.connect(transport="tcp", host="::1", silence_s=5.0)
        assert sync._link == LinkSettings(host="::1", silence_s=5.0)
        for _ in range(2):
            report = await world.publish()
            assert (report.replicas, report.attempts) == (3, 1)
            await world.assert_equal()
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 120))


def test_an_address_of_another_host_ends_the_set_up_and_is_named_by_its_key(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match="the trainer failed at open: policy.generation.refit_cfg.host=192.0"):
            await world.connect(transport="tcp", host="192.0.2.1")
        assert time.monotonic() - start < TIMEOUT_S
        await world.connect(transport="tcp")
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 120))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_refits_over_nccl_are_equal_bit_for_bit(loop: asyncio.Runner, world: World, dialect: Any) -> None:
    async def play() -> None:
        await world.connect(transport="nccl", link=nccl_link(dialect))
        for _ in range(2):
            report = await world.publish()
            assert (report.replicas, report.attempts) == (3, 1)
            assert report.bytes > 5 * BUCKET_MIB * 2**20
            await world.assert_equal()
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 120))


def test_a_library_that_is_not_there_is_named(loop: asyncio.Runner, world: World) -> None:
    async def play() -> None:
        with pytest.raises(WeightSyncError, match="NCCL library /no/such/libnccl.so"):
            await world.connect(transport="nccl", link=LinkSettings(20.0, nccl_library="/no/such/libnccl.so"))

    loop.run(asyncio.wait_for(play(), 60))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reader_that_hangs_is_named_at_the_deadline_and_the_next_refit_over_nccl_works(
    loop: asyncio.Runner, world: World, dialect: Any
) -> None:
    async def play() -> None:
        await world.connect(SHORT_TIMEOUT_S, transport="nccl", link=nccl_link(dialect), min_replicas=3)
        await world.publish()
        await world.plant(1, "slow receiver")
        start = time.monotonic()
        with pytest.raises(RefitError, match=r"generation\[1\]") as caught:
            await world.publish()
        assert time.monotonic() - start < 2 * SHORT_TIMEOUT_S + 10
        assert (caught.value.end, caught.value.phase) == ("generation[1]", "transfer")
        await world.on(1, FaultyHfWorker.heal)
        await world.connect(transport="nccl", link=nccl_link(dialect))
        await world.assert_works()
        await world.assert_equal()

    loop.run(asyncio.wait_for(play(), 120))


def test_a_reader_that_is_stopped_is_lost_after_the_silence_over_tcp(loop: asyncio.Runner, world: World) -> None:
    """The fleet is one smaller after it."""

    async def play() -> None:
        await world.connect(transport="tcp", silence_s=1.0, min_replicas=2)
        await world.publish()
        await world.plant(2, "stops midway")
        start = time.monotonic()
        report = await world.publish()
        # The silence, and the driver's patience with one that does not even answer an abort: no deadline.
        assert time.monotonic() - start < TIMEOUT_S - 5
        assert (report.replicas, report.attempts) == (2, 2)
        assert [one.replica for one in world.generator.weight_receivers()] == ["generation[0]", "generation[1]"]
        await world.assert_works()

    loop.run(asyncio.wait_for(play(), 120))


def test_a_reader_that_is_killed_midway_over_nccl_leaves_the_fleet_and_the_last_one_ends_the_refit(
    loop: asyncio.Runner, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Last: no engine is left after it."""

    async def play() -> None:
        await world.connect(transport="nccl", link=nccl_link())
        await world.publish()
        await world.plant(0, "dies midway")
        start = time.monotonic()
        report = await world.publish()
        assert time.monotonic() - start < TIMEOUT_S
        assert (report.replicas, report.attempts) == (1, 2)
        assert [one.replica for one in world.generator.weight_receivers()] == ["generation[1]"]
        await world.assert_works()
        await world.assert_equal()
        await world.connect(transport="nccl", link=nccl_link("allreduce"))
        await world.assert_works()
        await world.assert_equal()
        await world.plant(1, "dies midway")
        start = time.monotonic()
        with pytest.raises(RefitError, match=r"generation\[1\] .*died during") as caught:
            await world.publish()
        assert time.monotonic() - start < TIMEOUT_S
        assert (caught.value.end, caught.value.state) == ("generation[1]", "DIRTY")

    with caplog.at_level(logging.WARNING):
        loop.run(asyncio.wait_for(play(), 120))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [text.partition(":")[0] for text in said] == ["replica generation[0] leaves the fleet, 1 are left"]
