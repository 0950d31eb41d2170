"""Whole runs of the tiny model with dynamic sampling: half of the prompts are so easy that all siblings are right."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rl.core.errors import FatalError
from tests.support.tiny_run import TinyRun, assert_same_training, finish, make_tiny_run, read_until

EASY = "tests.support.tiny_rewards:too_easy_every_second"
SURPLUS = ["grpo.batch_multiplier=2", "loss_fn.use_importance_sampling_correction=true"]
CHANGES: dict[str, dict[str, Any]] = {"checkpointing": {"save_period": 2, "metric_name": None}}


def make_run(folder: Path, reward: str = EASY) -> TinyRun:
    run = make_tiny_run(folder, reward=reward, changes=CHANGES)
    run.config.write_text(run.config.read_text().replace("grpo:\n", "grpo:\n  use_dynamic_sampling: true\n"))
    return run


def records(run: TinyRun, step: int) -> list[dict[str, Any]]:
    """The rollouts that a step trained."""
    lines = (run.log_dir / "exp_001" / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kill_in(run: TinyRun, overrides: list[str], text: str) -> None:
    """Start the run, and kill it once it prints `text`."""
    process = run.start(overrides)
    read_until(process, text)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)


def check_prompts(run: TinyRun, steps: int) -> None:
    """Every step is full, of prompts that vary, and none is trained twice."""
    trained = [records(run, step) for step in range(1, steps + 1)]
    assert [len(step) for step in trained] == [8] * steps
    numbers = [int(record["prompt"][0]["content"][4:6]) for step in trained for record in step[::4]]
    assert all(number % 2 for number in numbers)
    assert len(set(numbers)) == len(numbers) == 2 * steps


def test_filtered_groups_are_replaced_counted_and_left_out_of_the_reward(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.run(["grpo.max_num_steps=4", "checkpointing.enabled=false"])
    check_prompts(run, 4)
    lines = run.metrics()
    filtered = [int(line["train/dynamic_sampling_num_filtered_groups"]) for line in lines]
    assert sum(filtered) > 0
    for step, line in enumerate(lines, start=1):
        rewards = [record["reward"] for record in records(run, step)]
        easy = 4 * filtered[step - 1]
        assert line["train/num_prompt_groups"] == 2
        assert line["train/dynamic_sampling_num_gen_batches"] == (2 + filtered[step - 1]) / 2
        assert line["train/dynamic_sampling_num_discarded_valid_samples"] == easy
        assert line["train/dynamic_sampling_num_carried_groups"] == 0
        assert line["train/reward"] == pytest.approx(sum(rewards) / 8)
        assert line["train/unfiltered_reward"] == pytest.approx((sum(rewards) + easy) / (8 + easy))
        assert line["train/staleness_max"] == 0


def test_rewards_that_never_vary_end_the_run_and_say_what_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tests.support.tiny_rewards:always_right")
    with pytest.raises(
        FatalError,
        match=r"step 1 cannot be filled: 6 of 6 prompt groups \(100%\) had equal rewards.*0 of the 2 needed.*100% all 1"
        r".*harder.*raise grpo\.dynamic_sampling_max_gen_batches=3",
    ):
        run.run(["grpo.dynamic_sampling_max_gen_batches=3"])
    assert run.status() == "unfinished"


def test_a_synchronous_run_equals_one_that_was_killed_and_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.run(["grpo.max_num_steps=5"], resume="never")
    killed = TinyRun(run.config, tmp_path / "killed")
    overrides = ["grpo.max_num_steps=5", f"logger.log_dir={killed.log_dir}"]
    kill_in(killed, overrides, "step 3/5")
    report = killed.run(overrides)
    assert [line["step"] for line in killed.metrics()] == [1, 2, 3, 4, 5]
    assert_same_training(run.log_dir / "exp_001", report.run_folder)


def test_surplus_is_trained_first_and_a_kill_neither_loses_nor_repeats_a_prompt(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    overrides = ["grpo.max_num_steps=5", *SURPLUS]
    kill_in(run, overrides, "step 3/5")
    run.run(overrides)
    check_prompts(run, 5)
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["train/dynamic_sampling_num_carried_groups"] for line in lines) <= 2
    assert max(line["train/staleness_max"] for line in lines) == 1
    assert lines[-1]["train/dynamic_sampling_num_carried_groups"] == 0
