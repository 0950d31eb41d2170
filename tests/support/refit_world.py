"""A trainer, generator workers in processes of their own, and the refits between them.

    async with started(folder, num_replicas=2) as world:
        await world.connect(transport="tcp")
        report = await world.publish()

The workers are the product's (`rl.generation.hf`, with switches for faults) over Ray, the trainer is its policy.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import Cluster
from rl.controller.refit_check import CheckParts, CheckSettings, RefitCheck
from rl.core.clock import SystemClock
from rl.core.resources import RunResources
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import GeneratorRequest
from rl.generation.pool import PooledGenerator, replicas_of
from rl.trainer.policy import WorkerPolicy, start_policy
from rl.weights.attempt import Patience
from rl.weights.config import RefitConfig
from rl.weights.report import SyncReport
from rl.weights.sync import WeightSync
from rl.weights.transport import LinkSettings
from tests.support.policies import make_request, make_settings, worker_of
from tests.support.refit_faults import FaultyHfWorker
from tests.support.tiny_model import make_tiny_model

TOKENS = tuple((37 * index + 11) % 256 for index in range(32))
# A tenth of the model in a bucket: tensors are split, and every refit has many buckets.
BUCKET_MIB = 0.016
TIMEOUT_S = 20.0
PATIENCE = Patience(late=1.0, abort=2.0, end=2.0)


@dataclass
class World:
    """A trainer, two engines in processes, and the refits between them."""

    policy: WorkerPolicy
    generator: PooledGenerator[FaultyHfWorker]
    run_tag: str
    version: int = -1
    sync: WeightSync | None = None

    async def connect(
        self, timeout_s: float = TIMEOUT_S, link: LinkSettings | None = None, **settings: Any
    ) -> WeightSync:
        """Make links; the run's first, others after a fault of the set-up, or of another transport."""
        if self.sync is not None:
            await self.sync.close()
        config = RefitConfig(bucket_mib=BUCKET_MIB, timeout_s=timeout_s, **settings)
        sender, clock = self.policy.weight_sender(), SystemClock()
        self.sync = WeightSync(sender, self.generator, config, self.run_tag, clock, link=link)
        self.sync.patience = PATIENCE
        await self.sync.connect()
        return self.sync

    async def publish(self) -> SyncReport:
        """Change every weight a little and bring it to the engines."""
        assert self.sync is not None
        self.perturb()
        return await self.sync.publish(self.next_version())

    def next_version(self) -> int:
        """The trainer's own count, as if it had trained."""
        self.version = 0 if self.version < 0 else worker_of(self.policy).end_train()
        return self.version

    def perturb(self) -> None:
        """Every tensor gets some noise."""
        generator = torch.Generator().manual_seed(self.version + 100)
        with torch.no_grad():
            for tensor in worker_of(self.policy)._model.named_tensors().values():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02)

    @property
    def check(self) -> RefitCheck:
        """A probe that is due."""
        assert self.sync is not None
        parts = CheckParts(self.policy, self.generator, self.sync)
        return RefitCheck(parts, CheckSettings(TOKENS, 1, 1e-4, "float32", 30.0), SystemClock())

    async def probe(self, report: SyncReport) -> dict[str, float]:
        """Both sides score."""
        check = self.check
        check.begin(report)
        return await check.end()

    async def on(self, replica: int, method: Any, *arguments: Any) -> Any:
        """Call a worker's method."""
        return await self.generator._group.call(replica, method, *arguments)

    async def plant(self, replica: int, fault: str) -> None:
        await self.on(replica, FaultyHfWorker.plant, fault)

    async def assert_works(self) -> str:
        """Without the fault the next refit arrives, is proved byte by byte, and engines compute like the trainer."""
        for replica in self.generator._replicas:
            await self.on(replica, FaultyHfWorker.heal)
        report = await self.publish()
        gap = (await self.probe(report))["probe_gap"]
        assert gap < 1e-5
        assert self.generator.version == self.version
        return f"next refit good (gap {gap:.0e})"

    async def assert_equal(self) -> None:
        """Every engine that is left has every tensor of the trainer, bit for bit."""
        for replica in self.generator._replicas:
            for name, tensor in worker_of(self.policy)._model.named_tensors().items():
                assert torch.equal(await self.on(replica, FaultyHfWorker.parameter, name), tensor), (replica, name)


async def start_engines(
    cluster: Cluster, model: Path, num_replicas: int, loaded_version: int | None = None
) -> PooledGenerator[FaultyHfWorker]:
    request = GeneratorRequest(
        model_path=str(model),
        tokenizer_path=str(model),
        precision="float32",
        max_model_len=64,
        seed=0,
        num_threads=1,
        gpus_per_replica=0,
        trust_remote_code=False,
        call_timeout_s=60.0,
        loaded_version=loaded_version,
    )
    config = HfGenerationConfig(num_replicas=num_replicas)
    workers = replicas_of(request, num_replicas, 4, 60.0)
    group = await cluster.start_workers(FaultyHfWorker, workers, config, request)
    return PooledGenerator(group, FaultyHfWorker, request, 4)


@asynccontextmanager
async def started(folder: Path, num_replicas: int = 2, **model: Any) -> AsyncIterator[World]:
    path = make_tiny_model(folder / "tiny", **model)
    with RunResources.create() as run:
        local = LocalCluster(ClusterConfig(kind="local"), run)
        cluster = await build_cluster(ClusterConfig(kind="ray", start_timeout_s=120.0, object_store_mib=80), run)
        try:
            policy = await start_policy(local, make_settings(path), make_request(path))
            generator = await start_engines(cluster, path, num_replicas)
            yield World(policy, generator, run.tag)
        finally:
            await cluster.shutdown()
            await local.shutdown()
