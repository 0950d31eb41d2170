"""A run's marks, and the clean-up when it ends in order or dies (no Ray)."""

import multiprocessing.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from rl.core.errors import ConfigError
from rl.core.reaper import TAG_VARIABLE, Reaper, read_environment, read_process
from rl.core.resources import RunResources
from tests.support.waiting import wait_for_exit, wait_for_round_of

SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]


def test_two_runs_have_different_tags_and_folders():
    with RunResources.create() as first, RunResources.create() as second:
        assert first.tag != second.tag
        assert first.temp_dir.is_dir() and second.temp_dir.is_dir()
        assert len(str(first.temp_dir)) < 40
        assert first.shm_name("weights") == f"{first.tag}-weights"


def test_the_mark_of_an_outer_run_comes_back_after_an_inner_one(monkeypatch):
    monkeypatch.delenv(TAG_VARIABLE, raising=False)
    with RunResources.create() as outer:
        with RunResources.create() as inner:
            assert os.environ[TAG_VARIABLE] == inner.tag
        assert os.environ[TAG_VARIABLE] == outer.tag
    assert TAG_VARIABLE not in os.environ


def test_multiprocessing_and_vllm_keep_their_sockets_in_the_runs_folder():
    before = os.environ.get("VLLM_RPC_BASE_PATH")
    with RunResources.create() as run:
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(run.temp_dir)
        assert multiprocessing.util.get_temp_dir() == str(run.temp_dir)
    assert os.environ.get("VLLM_RPC_BASE_PATH") == before
    assert multiprocessing.util.get_temp_dir() != str(run.temp_dir)


def test_a_long_parent_is_refused_with_the_limit(tmp_path):
    parent = tmp_path / ("x" * 60)
    parent.mkdir()
    with pytest.raises(ConfigError, match="sockets below it allow 40"):
        RunResources.create(parent)


def test_close_ends_tagged_processes_and_spares_others():
    run = RunResources.create()
    tagged = subprocess.Popen(SLEEPER, env=os.environ | run.environment())
    other_environment = {key: value for key, value in os.environ.items() if key != TAG_VARIABLE}
    other = subprocess.Popen(SLEEPER, env=other_environment)
    segment = shared_memory.SharedMemory(name=run.shm_name("left"), create=True, size=64)
    try:
        report = run.close()
        assert tagged.wait(timeout=5) == -signal.SIGTERM
        assert other.poll() is None
        assert [line.split()[0] for line in report.ended] == [str(tagged.pid)]
        assert report.removed == [run.shm_name("left")]
        assert not run.temp_dir.exists()
        assert run.close() == report
    finally:
        other.kill()
        other.wait()
        segment.close()
        if Path("/dev/shm", segment.name).exists():
            segment.unlink()


def test_a_process_in_the_middle_of_exec_is_waited_for(tmp_path, monkeypatch):
    script = (
        f"import os, subprocess; child = subprocess.Popen({SLEEPER}, env=os.environ | {{{TAG_VARIABLE!r}: 'tdm-1'}}); "
        "print(child.pid, flush=True); print(child.wait(), flush=True); input()"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child, looks = int(driver.stdout.readline()), []

    def read(pid):
        looks.append(pid)
        return [] if pid == child and looks.count(pid) < 3 else read_environment(pid)

    monkeypatch.setattr("rl.core.reaper.read_environment", read)
    reaper = Reaper("tdm-1", tmp_path / "gone", read_process(driver.pid)[0], time.time())
    assert [line.split()[0] for line in reaper.sweep(driver_is_dead=False)["ended"]] == [str(child)]
    assert driver.communicate("\n", timeout=5)[0] == f"-{signal.SIGTERM.value}\n"


DRIVER = textwrap.dedent(
    """
    import multiprocessing, os, signal, subprocess, sys, time
    from multiprocessing import shared_memory
    from rl.core.resources import RunResources

    def ignore_and_sleep():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)

    if __name__ == "__main__":
        run = RunResources.create()
        forked = multiprocessing.get_context("fork").Process(target=ignore_and_sleep)
        forked.start()
        spawned = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        script = (
            "from multiprocessing import shared_memory, resource_tracker\\n"
            "import time\\n"
            "s = shared_memory.SharedMemory(create=True, size=64)\\n"
            "resource_tracker.unregister(s._name, 'shared_memory')\\n"
            "print(s.name, flush=True)\\n"
            "time.sleep(300)\\n"
        )
        holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        foreign = holder.stdout.readline().strip()
        own = shared_memory.SharedMemory(name=run.shm_name("weights"), create=True, size=64)
        print(run.tag, run.temp_dir, foreign, forked.pid, spawned.pid, holder.pid, run.reaper.process.pid, flush=True)
        time.sleep(300)
    """
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_of_a_killed_driver_is_left_within_ten_seconds(tmp_path, number):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    bystander = subprocess.Popen(SLEEPER)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        words = driver.stdout.readline().split()
        tag, temp_dir, foreign, pids = words[0], Path(words[1]), words[2], [int(word) for word in words[3:]]
        wait_for_round_of(pids[-1])  # What a process maps must be seen while it lives.
        driver.send_signal(number)
        driver.wait(timeout=5)
        wait_for_exit(pids, deadline_s=10.0)
        assert not temp_dir.exists()
        assert not [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(tag)]
        assert not Path("/dev/shm", foreign).exists()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        driver.kill()
        driver.wait()


HOLDER = textwrap.dedent(
    """
    import multiprocessing, os, signal, time
    from multiprocessing.resource_tracker import _resource_tracker
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(_resource_tracker._pid, signal.SIGKILL)  # It might unlink the semaphore first.
    print(semaphore._semlock.name, flush=True)
    time.sleep(300)
    """
)


def test_named_semaphores_of_a_process_that_had_to_be_killed_are_removed(tmp_path):
    run = RunResources.create()
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    environment = os.environ | run.environment()
    holder = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    name = Path("/dev/shm", "sem." + holder.stdout.readline().strip().removeprefix("/"))
    try:
        assert name.exists()
        report = run.close()
        assert holder.wait(timeout=5) == -signal.SIGKILL
        assert not name.exists()
        assert name.name in report.removed
    finally:
        holder.kill()
        holder.wait()
        name.unlink(missing_ok=True)
