"""The local cluster: calls, deadlines, errors and the ends of workers, all in this process."""

import asyncio

import pytest

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import WorkerRequest
from rl.core.errors import ConfigError, DataError, FatalError, InfraError
from rl.core.resources import RunResources
from tests.support.cluster_workers import EchoWorker, RefusingWorker


def request(name="echo", num_workers=1, concurrency=1, call_timeout_s=10.0, gpus_per_worker=0):
    """A worker request with short deadlines."""
    return WorkerRequest(name, num_workers, 1, gpus_per_worker, concurrency, call_timeout_s)


@pytest.fixture
async def cluster(tmp_path):
    """A local cluster."""
    config = ClusterConfig(kind="local", start_timeout_s=5.0)
    built = await build_cluster(config, RunResources("tdm-00000000", tmp_path))
    assert isinstance(built, LocalCluster)
    yield built
    await built.shutdown()


async def test_broadcast_scatter_and_call_reach_the_right_ranks(cluster):
    group = await cluster.start_workers(EchoWorker, request(num_workers=3), 100)
    assert await group.broadcast(EchoWorker.add, 1, more=10) == [111, 112, 113]
    assert await group.scatter(EchoWorker.add, [1, 2, 3]) == [101, 103, 105]
    assert await group.call(2, EchoWorker.add, 0) == 102
    contexts = await group.broadcast(EchoWorker.show_context)
    assert [(context.rank, context.world_size, context.device) for context in contexts] == [
        (0, 3, "cpu"),
        (1, 3, "cpu"),
        (2, 3, "cpu"),
    ]


async def test_a_wrong_number_of_shards_or_rank_is_refused(cluster):
    group = await cluster.start_workers(EchoWorker, request(num_workers=2))
    with pytest.raises(FatalError, match="got 3 shards for 2 workers"):
        await group.scatter(EchoWorker.add, [1, 2, 3])
    with pytest.raises(FatalError, match="ranks 0 to 1, got 2"):
        await group.call(2, EchoWorker.add, 1)


async def test_errors_arrive_as_raised_with_the_place(cluster):
    group = await cluster.start_workers(EchoWorker, request())
    with pytest.raises(DataError, match="sample 7 is empty") as caught:
        await group.call(0, EchoWorker.bad_data)
    assert caught.value.__notes__ == ["raised in worker echo[0].bad_data"]
    with pytest.raises(ZeroDivisionError):
        await group.call(0, EchoWorker.bug)
    with pytest.raises(InfraError, match=r"worker echo\[0\] left leave with SystemExit\(3\)"):
        await group.call(0, EchoWorker.leave)
    assert await group.call(0, EchoWorker.add, 1) == 1


async def test_a_call_past_its_deadline_is_named_and_spoils_health_until_restart(cluster):
    group = await cluster.start_workers(EchoWorker, request(call_timeout_s=0.2), 5)
    with pytest.raises(InfraError, match=r"worker echo\[0\] did not finish hang within 0.2 s"):
        await group.call(0, EchoWorker.hang)
    assert await group.check_health() == [False]
    await group.restart(0)
    assert await group.check_health() == [True]
    assert await group.call(0, EchoWorker.add, 1) == 6


async def test_a_failing_rank_ends_the_wait_for_the_others(cluster):
    group = await cluster.start_workers(EchoWorker, request(num_workers=2, concurrency=2))

    async def open_gate():
        await group.call(0, EchoWorker.open_gate)

    waiting = asyncio.ensure_future(group.call(0, EchoWorker.wait_for_gate))
    with pytest.raises(ZeroDivisionError):
        await group.broadcast(EchoWorker.bug)
    await open_gate()
    assert await waiting == "open"


async def test_concurrency_lets_calls_of_one_worker_overlap(cluster):
    group = await cluster.start_workers(EchoWorker, request(concurrency=2))
    waiting = asyncio.ensure_future(group.call(0, EchoWorker.wait_for_gate))
    await group.call(0, EchoWorker.open_gate)
    assert await waiting == "open"


@pytest.mark.parametrize(
    ("manner", "kind", "message"),
    [
        ("config", ConfigError, "policy.model_name='nowhere' does not exist"),
        ("bug", InfraError, r"worker echo\[0\] could not be built: ValueError: a bug in the constructor"),
    ],
)
async def test_a_failing_constructor_reaches_the_driver(cluster, manner, kind, message):
    with pytest.raises(kind, match=message):
        await cluster.start_workers(RefusingWorker, request(), manner)


async def test_a_hanging_constructor_meets_the_start_deadline(tmp_path):
    cluster = LocalCluster(ClusterConfig(kind="local", start_timeout_s=0.2), RunResources("tdm-00000000", tmp_path))
    with pytest.raises(InfraError, match="did not finish its start within 0.2 s"):
        await cluster.start_workers(RefusingWorker, request(call_timeout_s=0.1), "hang")


async def test_gpus_that_are_not_there_are_refused_with_both_numbers(cluster):
    with pytest.raises(ConfigError, match=r"wants 2 GPUs \(1 workers x 2\), 0 are free"):
        await cluster.start_workers(EchoWorker, request(gpus_per_worker=2))


async def test_close_twice_is_fine_and_later_calls_say_so(cluster):
    group = await cluster.start_workers(EchoWorker, request())
    await group.close()
    await group.close()
    await cluster.shutdown()
    await cluster.shutdown()
    assert await group.check_health() == [False]
    with pytest.raises(InfraError, match=r"worker echo\[0\] cannot take add: its group is closed"):
        await group.call(0, EchoWorker.add, 1)


async def test_sixteen_groups_at_once_find_a_port_each(cluster):
    names = [f"echo{number}" for number in range(16)]
    groups = await asyncio.gather(
        *(cluster.start_workers(EchoWorker, request(name, num_workers=2, concurrency=2)) for name in names)
    )
    met = await asyncio.gather(*(group.broadcast(EchoWorker.meet) for group in groups))
    assert met == [[["0", "1"], ["0", "1"]]] * 16
    ports = {(await group.call(0, EchoWorker.show_context)).rendezvous for group in groups}
    assert len(ports) == 16
