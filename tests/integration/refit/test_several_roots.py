"""Several trainer ranks, each a root of the refit, through the whole transaction and over every transport."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.cluster.config import ClusterConfig
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import WorkerGroup, WorkerRequest
from rl.core.clock import SystemClock
from rl.core.resources import RunResources
from rl.generation.pool import PooledGenerator
from rl.trainer.weight_sender import SENDER_CALLS, WorkerSender
from rl.weights.config import RefitConfig
from rl.weights.report import RefitError
from rl.weights.sync import WeightSync
from rl.weights.transport import LinkSettings, TransportName
from tests.support.nccl import DIALECTS, nccl_link
from tests.support.policies import make_request, make_settings
from tests.support.refit_faults import FaultyHfWorker
from tests.support.refit_trainer import ShardedPolicyWorker
from tests.support.refit_world import BUCKET_MIB, PATIENCE, TIMEOUT_S, start_engines
from tests.support.tiny_model import make_tiny_model

LINKS: list[tuple[TransportName, LinkSettings | None]] = [
    ("shm", None),
    ("tcp", None),
    *(("nccl", nccl_link(dialect)) for dialect in DIALECTS),
]
Trainer = WorkerGroup[ShardedPolicyWorker]
Generator = PooledGenerator[FaultyHfWorker]


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[Trainer, Generator, str]]:
    """Two trainer processes with a half of every tensor each, and two generators."""
    path = make_tiny_model(folder / "tiny")
    with RunResources.create() as run:
        cluster = await build_cluster(ClusterConfig(kind="ray", start_timeout_s=120.0, object_store_mib=80), run)
        try:
            workers = WorkerRequest("policy", 2, 1, 0, 1 + SENDER_CALLS, 60.0)
            settings = make_settings(path, num_workers=2)
            trainer = await cluster.start_workers(ShardedPolicyWorker, workers, settings, make_request(path))
            yield trainer, await start_engines(cluster, path, 2), run.tag
        finally:
            await cluster.shutdown()


async def assert_equal(trainer: Trainer, generator: Generator, where: Any) -> int:
    """Every engine has every tensor bit for bit; return their bytes."""
    whole = await trainer.call(0, ShardedPolicyWorker.whole)
    for replica in range(generator.num_replicas):
        for name, tensor in whole.items():
            held = await generator._group.call(replica, FaultyHfWorker.parameter, name)
            assert torch.equal(held, tensor), (where, replica, name)
    return sum(tensor.nbytes for tensor in whole.values())


async def one_after_the_other(trainer: Trainer, generator: Generator, tag: str) -> None:
    version = -1
    for transport, link in LINKS:
        config = RefitConfig(transport=transport, bucket_mib=BUCKET_MIB, timeout_s=TIMEOUT_S)
        sync = WeightSync(WorkerSender(trainer), generator, config, tag, SystemClock(), link=link)
        await sync.connect()
        for _ in range(2):
            version += 1
            await trainer.broadcast(ShardedPolicyWorker.change, version)
            report = await sync.publish(version)
            assert (report.attempts, report.replicas) == (1, 2)
        assert report.bytes == await assert_equal(trainer, generator, (transport, link))
        await sync.close()
    # Then a root is gone: who is blamed is the trainer, and no engine leaves the fleet for it.
    config = RefitConfig(transport="shm", bucket_mib=BUCKET_MIB, timeout_s=TIMEOUT_S)
    sync = WeightSync(WorkerSender(trainer), generator, config, tag, SystemClock())
    sync.patience = PATIENCE
    await sync.connect()
    os.kill(await trainer.call(1, ShardedPolicyWorker.pid), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RefitError, match=r"the trainer: .*policy\[1\]") as caught:
        await sync.publish(version + 1)
    assert time.monotonic() - start < TIMEOUT_S
    assert (caught.value.end, generator.num_replicas) == ("the trainer", 2)


def test_two_roots_bring_their_shares_over_every_transport_and_a_dead_one_is_named(tmp_path: Path) -> None:
    async def play() -> None:
        async with started(tmp_path) as scene:
            await one_after_the_other(*scene)

    asyncio.run(asyncio.wait_for(play(), 180))
