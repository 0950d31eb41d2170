"""Computes a little with the real parts and compares: native kernels, the refit's transfer, worker calls, clean-up.

It needs no model, no network, no Ray and no vLLM, and takes a few seconds.
"""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.cluster.worker_group import WorkerContext, WorkerRequest
from rl.controller.checklist import Check
from rl.controller.selftest_kernels import kernel_tests
from rl.controller.selftest_refit import refit_tests
from rl.core.errors import RLError
from rl.core.resources import RunResources

SEGMENT_BYTES = 1 << 20
CHILD_DEADLINE_S = 30.0


def run_selftest() -> list[Check]:
    """Run every test; one that fails does not stop the others."""
    return [
        *(attempt(name, test) for name, test in [*kernel_tests(), *refit_tests()]),
        attempt("worker calls", call_workers),
        attempt("shared memory", pass_shared_memory),
        attempt("clean-up", clean_up),
    ]


def attempt(name: str, test: Callable[[], str]) -> Check:
    """Run one test; its errors become a failed check."""
    begin = time.monotonic()
    try:
        detail = test()
    except (RLError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}", "`tandem doctor` looks for the cause")
    return Check(name, True, f"{detail} ({time.monotonic() - begin:.2f} s)")


class SumWorker:
    """The smallest worker."""

    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank

    def add(self, value: int) -> int:
        """Return the sum with the rank."""
        return value + self._rank


def call_workers() -> str:
    """Call two workers in this process."""

    async def scenario(run: RunResources) -> list[int]:
        cluster = LocalCluster(ClusterConfig(kind="local"), run)
        try:
            group = await cluster.start_workers(SumWorker, WorkerRequest("sum", 2, 1, 0, 1, 10.0))
            return await group.broadcast(SumWorker.add, 40) + await group.scatter(SumWorker.add, [1, 2])
        finally:
            await cluster.shutdown()

    with RunResources.create() as run:
        results = asyncio.run(scenario(run))
    if results != [40, 41, 1, 3]:
        raise RuntimeError(f"two workers gave {results} instead of [40, 41, 1, 3]")
    return "two workers answered"


def pass_shared_memory() -> str:
    """Write a segment; another process must read the same bytes."""
    content = os.urandom(SEGMENT_BYTES)
    with RunResources.create() as run:
        segment = shared_memory.SharedMemory(name=run.shm_name("selftest"), create=True, size=SEGMENT_BYTES)
        try:
            Path("/dev/shm", segment.name).write_bytes(content)
            script = f"import hashlib; print(hashlib.sha256(open('/dev/shm/{segment.name}', 'rb').read()).hexdigest())"
            command = [sys.executable, "-I", "-S", "-c", script]
            read = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=True)
        finally:
            segment.close()
            segment.unlink()
    if read.stdout.strip() != hashlib.sha256(content).hexdigest():
        raise RuntimeError("another process read other bytes than were written")
    return f"{SEGMENT_BYTES >> 20} MiB passed to another process"


def clean_up() -> str:
    """Leave a process and a segment behind; the end of the run must remove both and the temporary folder."""
    run = RunResources.create()
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(command, env=os.environ | run.environment())
    left = Path("/dev/shm", run.shm_name("left"))
    left.write_bytes(b"left behind")
    run.close()
    child.wait(timeout=CHILD_DEADLINE_S)
    if left.exists() or run.temp_dir.exists():
        raise RuntimeError(f"{left} or {run.temp_dir} is still there")
    return "leftover process, segment and folder removed"
