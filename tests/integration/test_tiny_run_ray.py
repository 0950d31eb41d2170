"""Whole runs with the tiny model over real Ray actors."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.leftovers import assert_nothing_left, children_of, tag_of
from tests.support.tiny_run import TinyRun, assert_same_training, finish, make_tiny_run, read_until

RAY: dict[str, dict[str, Any]] = {"cluster": {"kind": "ray", "threads": {"policy": 1, "generation": 1}}}


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
