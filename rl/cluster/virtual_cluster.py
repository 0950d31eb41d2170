"""Builds the cluster that the `cluster` section asks for. Knows no implementation beyond its import path."""

from collections.abc import Awaitable, Callable
from typing import cast

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.cluster.worker_group import Cluster
from rl.core.imports import import_object
from rl.core.resources import RunResources


async def build_cluster(config: ClusterConfig, run: RunResources) -> Cluster:
    """Start (or join) the cluster of a run.

    Raises:
        ConfigError: it cannot have what the configuration asks for.
        InfraError: it did not start.
    """
    if config.kind == "local":
        return LocalCluster(config, run)
    # Named by path, so that a machine without Ray can run the local kind.
    start = cast(Callable[[ClusterConfig, RunResources], Awaitable[Cluster]], import_object("rl.cluster.ray:start_ray"))
    return await start(config, run)
