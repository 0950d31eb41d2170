"""Worker groups over a real Ray, started once for this file."""

import asyncio
import os
import signal

import psutil
import pytest

from rl.cluster.config import ClusterConfig
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import WorkerRequest
from rl.core.errors import ConfigError, DataError, InfraError
from rl.core.resources import RunResources
from tests.support.cluster_workers import EchoWorker, RefusingWorker

CONFIG = ClusterConfig(kind="ray", start_timeout_s=60.0, object_store_mib=80)


def request(name="echo", num_workers=1, concurrency=1, call_timeout_s=30.0, gpus_per_worker=0, num_threads=2):
    """A worker request with short deadlines."""
    return WorkerRequest(name, num_workers, num_threads, gpus_per_worker, concurrency, call_timeout_s)


@pytest.fixture(scope="module")
def run():
    """A run with its reaper."""
    os.environ["WANDB_API_KEY"] = "a secret"
    with RunResources.create() as made:
        yield made
    del os.environ["WANDB_API_KEY"]


@pytest.fixture(scope="module")
def cluster(run):
    """A Ray cluster of our own, whatever other one the environment names."""
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    built = asyncio.run(build_cluster(CONFIG, run))
    yield built
    asyncio.run(built.shutdown())
    asyncio.run(built.shutdown())
    del os.environ["RAY_ADDRESS"]


async def test_calls_reach_ranks_that_met_at_their_rendezvous(cluster, run):
    group = await cluster.start_workers(EchoWorker, request(num_workers=2), 100)
    assert await group.broadcast(EchoWorker.add, 1, more=10) == [111, 112]
    assert await group.scatter(EchoWorker.add, [1, 2], more=5) == [106, 108]
    assert await group.call(1, EchoWorker.add, 0) == 101
    assert await group.broadcast(EchoWorker.size, b"x" * 2_000_000) == [2_000_000] * 2
    assert await group.broadcast(EchoWorker.meet) == [["0", "1"], ["0", "1"]]
    context = await group.call(1, EchoWorker.show_context)
    assert (context.rank, context.local_rank, context.device, context.run_tag) == (1, 1, "cpu", run.tag)
    assert len(set(await group.broadcast(EchoWorker.pid))) == 2
    await group.close()


async def test_workers_get_threads_and_marks_and_no_secrets(cluster, run):
    group = await cluster.start_workers(EchoWorker, request(num_threads=3))
    environment = await group.call(0, EchoWorker.environment)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["TANDEM_RUN_TAG"] == run.tag
    assert environment["TMPDIR"] == str(run.temp_dir)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert "WANDB_API_KEY" not in environment
    await group.close()


async def test_errors_arrive_as_raised_with_the_workers_traceback(cluster):
    group = await cluster.start_workers(EchoWorker, request())
    with pytest.raises(DataError, match="sample 7 is empty") as caught:
        await group.call(0, EchoWorker.bad_data)
    assert "raised in worker echo[0].bad_data" in caught.value.__notes__[0]
    assert "in bad_data" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        await group.call(0, EchoWorker.bug)
    with pytest.raises(InfraError, match=r"worker echo\[0\].unpicklable failed: Local: cannot travel"):
        await group.call(0, EchoWorker.unpicklable)
    assert await group.call(0, EchoWorker.add, 1) == 1
    await group.close()


async def test_a_killed_worker_is_an_infra_error_with_its_last_lines_and_can_be_replaced(cluster):
    group = await cluster.start_workers(EchoWorker, request(num_workers=2), 5)
    with pytest.raises(InfraError, match=r"(?s)worker echo\[1\].*died during die.*last words of a dying worker"):
        await group.call(1, EchoWorker.die)
    assert await group.check_health() == [True, False]
    await group.restart(1)
    assert await group.check_health() == [True, True]
    assert await group.broadcast(EchoWorker.add, 0) == [5, 6]
    await group.close()
    await group.close()
    with pytest.raises(InfraError, match="its group is closed"):
        await group.call(0, EchoWorker.add, 1)


async def test_a_worker_killed_from_outside_during_a_call_ends_the_call(cluster):
    group = await cluster.start_workers(EchoWorker, request(concurrency=2))
    pid = await group.call(0, EchoWorker.pid)
    waiting = asyncio.ensure_future(group.call(0, EchoWorker.hang))
    await group.call(0, EchoWorker.add, 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InfraError, match=rf"pid {pid} on .* died during hang: Worker .* It was killed"):
        await waiting
    await group.close()


async def test_a_call_past_its_deadline_names_group_rank_method_and_seconds(cluster):
    group = await cluster.start_workers(EchoWorker, request(call_timeout_s=1.0))
    with pytest.raises(InfraError, match=r"worker echo\[0\] did not finish hang within 1 s"):
        await group.call(0, EchoWorker.hang)
    assert await group.check_health() == [True]
    await group.close()


async def test_close_ends_what_a_worker_started(cluster):
    group = await cluster.start_workers(EchoWorker, request())
    child = await group.call(0, EchoWorker.start_child)
    worker = await group.call(0, EchoWorker.pid)
    await group.close()
    assert not psutil.pid_exists(child)
    assert not psutil.pid_exists(worker)


@pytest.mark.parametrize(
    ("manner", "kind", "message"),
    [
        ("config", ConfigError, "policy.model_name='nowhere' does not exist"),
        ("bug", InfraError, r"(?s)could not be built: ValueError: a bug in the constructor.*echo tries to start"),
        ("die", InfraError, r"(?s)worker echo\[0\].*died during its start.*echo tries to start"),
    ],
)
async def test_a_failing_constructor_reaches_the_driver(cluster, manner, kind, message):
    with pytest.raises(kind, match=message):
        await cluster.start_workers(RefusingWorker, request(), manner)


async def test_resources_that_are_not_there_are_refused_before_waiting(cluster):
    with pytest.raises(
        ConfigError, match=r"wants 2 CPU slots and 2 GPU slots .*free in the cluster: .* 0 of 0 GPU slots"
    ):
        await cluster.start_workers(EchoWorker, request(num_workers=2, gpus_per_worker=1))
    with pytest.raises(ConfigError, match="wants 1000 CPU slots"):
        await cluster.start_workers(EchoWorker, request(num_workers=1000))


async def test_a_second_ray_in_the_same_process_is_refused(cluster, run):
    with pytest.raises(ConfigError, match="connected to a Ray cluster already"):
        await build_cluster(CONFIG, run)


async def test_more_gpus_or_nodes_than_there_are_are_refused_before_ray_starts(run):
    from rl.cluster.ray import own_settings

    with pytest.raises(ConfigError, match="cluster.gpus_per_node=99, but this host shows"):
        own_settings(CONFIG.model_copy(update={"gpus_per_node": 99}), run)
    with pytest.raises(ConfigError, match="cluster.num_nodes=2 needs a running Ray cluster"):
        own_settings(CONFIG.model_copy(update={"num_nodes": 2}), run)
