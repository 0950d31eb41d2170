"""The inside of a worker process: errors leave as values and come back as themselves."""

import pytest

from rl.cluster.host import Failure, Success, WorkerHost, death_notice, last_lines, memory_shortage
from rl.cluster.worker_group import WorkerContext
from rl.core.errors import ConfigError, DataError, InfraError
from tests.support.cluster_workers import EchoWorker, RefusingWorker

CONTEXT = WorkerContext("echo", 0, 1, 0, "", "cpu", 1, "tdm-00000000")


@pytest.fixture
def host(monkeypatch):
    """A host with a worker."""
    monkeypatch.delenv("TMPDIR", raising=False)
    built = WorkerHost()
    assert built.build(EchoWorker, CONTEXT, (10,), {}) == Success(None)
    return built


def test_positional_and_keyword_arguments_reach_the_method(host):
    assert host.invoke_flat("add", (), 1) == Success(11)
    assert host.invoke_flat("add", ("more",), 1, 100) == Success(111)
    assert host.invoke_flat("add", ("value", "more"), 1, 100) == Success(111)


def test_an_error_travels_as_itself_with_the_traceback(host):
    failure = host.invoke_flat("bad_data", ())
    error = failure.error("worker echo[0].bad_data")
    assert type(error) is DataError
    assert str(error) == "sample 7 is empty; drop it"
    assert "in bad_data" in error.__notes__[0]


def test_an_error_that_cannot_travel_becomes_an_infra_error_with_its_text(host):
    error = host.invoke_flat("unpicklable", ()).error("worker echo[0].unpicklable")
    assert type(error) is InfraError
    assert "Local: cannot travel" in str(error)


def test_an_exception_that_does_not_unpickle_here_keeps_its_text():
    error = Failure(b"not a pickle", "OddError: odd", "trace").error("worker echo[0].x")
    assert type(error) is InfraError
    assert "OddError: odd (its exception could not be rebuilt here" in str(error)


def test_a_failing_constructor_is_a_failure(host):
    failure = host.build(RefusingWorker, CONTEXT, ("config",), {})
    assert type(failure.error("start")) is ConfigError


def test_a_death_is_told_in_one_line():
    report = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: HostActor\n\tactor_id: 98db01cd\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
        "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called"
    )
    assert death_notice(report) == (
        "Worker unexpectedly exits with a connection error code 2. End of file. "
        "It was killed, perhaps by the kernel for want of memory, or crashed"
    )
    assert death_notice("The actor is dead because\nit was killed by `ray.kill`.") == (
        "The actor is dead because it was killed by `ray.kill`."
    )


def test_the_last_lines_skip_rays_markers(tmp_path):
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01\n" + "".join(f"line {i}\n" for i in range(50)) + "\n:actor_name:x\n")
    assert last_lines(str(log), count=2) == "line 48\nline 49"
    assert last_lines("") == ""
    assert last_lines(str(tmp_path / "missing")) == ""


def test_a_memory_shortage_is_told_in_one_line_with_the_largest_processes():
    report = (
        "2 worker(s) were killed due to the node running low on memory. It was 22.69GB used / 23.54GB limit\n"
        "OOM kill reason: Memory usage exceeded threshold\nEviction Stats:\n"
        "Top 10 memory users: PID        MEM(GB) COMMAND\n22517   14.38   python -m something\n14266\t2.57\tengine\n"
        "9322    2.34    ray::HostActor.invoke_flat\n9323    0.52    ray::HostActor\nRefer to the documentation"
    )
    assert memory_shortage(report) == (
        "2 worker(s) were killed due to the node running low on memory. It was 22.69GB used / 23.54GB limit; "
        "the largest processes: pid 22517 14.38 GB (python -m something), pid 14266 2.57 GB (engine), "
        "pid 9322 2.34 GB (ray::HostActor.invoke_flat); end what else runs there, or give the run less to hold"
    )
    assert memory_shortage("low on memory") == "low on memory; end what else runs there, or give the run less to hold"
