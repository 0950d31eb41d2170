"""A driver process with a Ray of its own, children and shared memory: the victim of tests that kill drivers.

It prints one JSON line when all is up, answers `call` on standard input with one line, and ends in order on `stop`.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

from rl.cluster.config import ClusterConfig
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import WorkerRequest
from rl.core.resources import RunResources
from tests.support.cluster_workers import EchoWorker


def ignore_terminate() -> None:
    """Outlive a polite request to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)


async def drive() -> None:
    """Start everything, serve standard input, and end in order."""
    run = RunResources.create()
    cluster = await build_cluster(ClusterConfig(kind="ray", object_store_mib=80), run)
    request = WorkerRequest("echo", 1, 1, 0, 1, 30.0)
    group = await cluster.start_workers(EchoWorker, request)
    worker_child = await group.call(0, EchoWorker.start_child)
    own_child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    stubborn = multiprocessing.get_context("fork").Process(target=ignore_terminate, daemon=True)
    stubborn.start()
    foreign = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{foreign.name}", "shared_memory")
    named = Path("/dev/shm", run.shm_name("weights"))
    named.write_bytes(b"x" * 4096)
    facts = {
        "tag": run.tag,
        "temp_dir": str(run.temp_dir),
        "segments": [foreign.name, named.name],
        "pids": [await group.call(0, EchoWorker.pid), worker_child, own_child.pid, stubborn.pid],
        "driver": os.getpid(),
        "reaper": run.reaper.process.pid,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    while (await asyncio.to_thread(sys.stdin.readline)).strip() == "call":
        sys.stdout.write(f"{await group.call(0, EchoWorker.add, 41, more=1)}\n")
        sys.stdout.flush()
    await cluster.shutdown()
    stubborn.kill()
    report = await asyncio.to_thread(run.close)
    sys.stdout.write(json.dumps({"ended": report.ended, "removed": report.removed}) + "\n")
    foreign.close()
    Path("/dev/shm", foreign.name).unlink()


if __name__ == "__main__":
    asyncio.run(drive())
