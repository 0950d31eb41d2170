"""Whole runs with the tiny model over real Ray actors."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.core.reaper import TAG_VARIABLE
from tests.support.tiny_run import TinyRun, assert_same_training, finish, make_tiny_run, read_until
from tests.support.waiting import wait_for_exit

RAY: dict[str, dict[str, Any]] = {"cluster": {"kind": "ray", "threads": {"policy": 1, "generation": 1}}}
GONE_WITHIN_S = 10.0


def children_of(process_id: int) -> list[psutil.Process]:
    """Every process that a run has started, directly or not."""
    return psutil.Process(process_id).children(recursive=True)


def tag_of(process_id: int) -> str:
    """The run's tag, out of the environment of one of its children."""
    tags = {child.environ().get(TAG_VARIABLE, "") for child in children_of(process_id)} - {""}
    assert len(tags) == 1, tags
    return tags.pop()


def test_a_run_over_ray_equals_one_in_this_process_and_resumes_after_a_kill(tmp_path: Path) -> None:
    here = make_tiny_run(tmp_path / "here", reward="tests.support.tiny_rewards:slow_share_of_letters")
    here.run(["grpo.max_num_steps=4"])

    over_ray = TinyRun(here.config, tmp_path / "ray")
    overrides = ["grpo.max_num_steps=4", "cluster.kind=ray", f"logger.log_dir={over_ray.log_dir}"]
    process = over_ray.start(overrides)
    read_until(process, "step 3/4")
    tag, children = tag_of(process.pid), children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert_nothing_left(tag, children)

    process = over_ray.start(overrides)
    code, output = finish(process)
    assert code == 0, output
    assert [line["step"] for line in over_ray.metrics()] == [1, 2, 3, 4]
    assert_same_training(here.log_dir / "exp_001", over_ray.log_dir / "exp_001")


def assert_nothing_left(tag: str, children: list[psutil.Process]) -> None:
    """No process, shared memory or temporary folder of the run is left soon after its end."""
    wait_for_exit(
        [child.pid for child in children], GONE_WITHIN_S
    )  # The reaper, which removes the rest, is among them.
    assert leftovers(tag) == []


def leftovers(tag: str) -> list[Path]:
    """What the run has left on the host."""
    return [path for folder in (Path("/dev/shm"), Path("/tmp")) for path in folder.glob(f"*{tag}*")]


@pytest.mark.parametrize(("number", "send"), [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)])
def test_a_signal_ends_a_run_over_ray_cleanly(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """Ctrl-C reaches every process of the terminal's group, SIGTERM the driver alone."""
    run = make_tiny_run(tmp_path, reward="tests.support.tiny_rewards:slow_share_of_letters", changes=RAY)
    process = run.start(["grpo.max_num_steps=50"])
    read_until(process, "step  2/50")
    tag, children = tag_of(process.pid), children_of(process.pid)
    send(process.pid, number)
    code, output = finish(process)
    assert code == 130, output
    assert "interrupted after step" in output
    assert "received at time" not in output, "a library's handler spoke instead of ours"
    assert_nothing_left(tag, children)
