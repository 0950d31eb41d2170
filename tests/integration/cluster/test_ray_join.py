"""Joining a Ray that somebody else runs, with GPUs that exist in Ray's books only: placement and leaving in order."""

import asyncio
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as RayTestCluster

from rl.cluster.config import ClusterConfig
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import WorkerRequest
from rl.core.errors import ConfigError
from rl.core.resources import RunResources
from tests.support.cluster_workers import EchoWorker
from tests.support.waiting import wait_until


def request(name, num_workers, gpus_per_worker):
    """A worker request with a short deadline."""
    return WorkerRequest(name, num_workers, 1, gpus_per_worker, 1, 30.0)


@pytest.fixture(scope="module")
def foreign():
    """A Ray cluster of somebody else with two GPUs in its books."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    (folder / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        head = {"num_cpus": 8, "num_gpus": 2, "object_store_memory": 80 << 20}
        cluster = RayTestCluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


async def use(cluster):
    """Start groups with and without GPUs; return what the GPU workers see."""
    group = await cluster.start_workers(EchoWorker, request("trainer", 2, 1))
    seen = await group.broadcast(EchoWorker.environment)
    contexts = await group.broadcast(EchoWorker.show_context)
    with pytest.raises(
        ConfigError, match="wants 1 CPU slots and 1 GPU slots .* 0 of 2 GPU slots; largest node: 2 GPUs"
    ):
        await cluster.start_workers(EchoWorker, request("generation", 1, 1))
    await group.close()
    # Ray's books follow the end of a group with a short delay, and tell nobody.
    free_gpus = partial(wait_until, lambda: ray.available_resources().get("GPU", 0.0) >= 2.0, "2 free GPUs", 20.0)
    await asyncio.to_thread(free_gpus)
    both = await cluster.start_workers(EchoWorker, request("generation", 1, 2))
    two = await both.call(0, EchoWorker.environment)
    await both.close()
    return seen, contexts, two


def test_workers_get_gpus_of_their_own_and_leaving_does_not_end_the_cluster(foreign):
    async def scenario(run):
        config = ClusterConfig(kind="ray", address=foreign.address, gpus_per_node=2, start_timeout_s=60.0)
        cluster = await build_cluster(config, run)
        try:
            return await use(cluster)
        finally:
            await cluster.shutdown()

    with RunResources.create() as run:
        seen, contexts, two = asyncio.run(scenario(run))
    assert sorted(environment["CUDA_VISIBLE_DEVICES"] for environment in seen) == ["0", "1"]
    assert [context.device for context in contexts] == ["cuda:0", "cuda:0"]
    assert two["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert {environment["TANDEM_RUN_TAG"] for environment in seen} == {run.tag}
    assert foreign.head_node.any_processes_alive()
    assert not foreign.head_node.dead_processes()


def test_more_nodes_than_the_cluster_has_are_refused(foreign):
    config = ClusterConfig(kind="ray", address=foreign.address, num_nodes=3, start_timeout_s=60.0)
    with RunResources.create() as run, pytest.raises(ConfigError, match="cluster.num_nodes=3, but Ray has 1 nodes"):
        asyncio.run(build_cluster(config, run))
