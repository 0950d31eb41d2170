"""Choosing the cluster by configuration."""

import subprocess
import sys

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.cluster.virtual_cluster import build_cluster
from rl.core.resources import RunResources


async def test_the_local_kind_is_built(tmp_path):
    built = await build_cluster(ClusterConfig(kind="local"), RunResources("tdm-00000000", tmp_path))
    assert isinstance(built, LocalCluster)


def test_the_module_needs_neither_ray_nor_torch():
    script = "import sys, rl.cluster.virtual_cluster; print([m for m in ('ray', 'torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
