"""The product itself: `tandem train` with its default model, over real Ray and the real vLLM engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.leftovers import assert_nothing_left, children_of, tag_of
from tests.support.tandem_command import ROOT
from tests.support.tiny_run import finish, read_until

QUICK = ["checkpointing.export_hf=false", "logger.tensorboard_enabled=false", "grpo.val_at_end=false"]
SYNCHRONOUS = [*QUICK, "grpo.max_num_steps=2", "checkpointing.enabled=false"]
ASYNCHRONOUS = [
    *QUICK,
    "grpo.max_num_steps=4",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    # Not after step 1: the next groups would be generated while the checkpoint is written, not while step 2 trains.
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=0",
    "checkpointing.metric_name=null",
]


def start(folder: Path, config: str, overrides: list[str]) -> "subprocess.Popen[str]":
    """Start the command in its own session, as in a terminal of its own."""
    paths = [str(ROOT), *(str(Path(path).absolute()) for path in sys.path if path)]
    return subprocess.Popen(
        [sys.executable, "-m", "rl", "train", "--config", config, "logger.log_dir=runs", *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def versions(run: Path, step: int) -> set[int]:
    """The policy versions that sampled the tokens of a step."""
    lines = (run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return {span[0] for line in lines for span in json.loads(line)["weight_versions"]}


def test_the_default_run_trains_what_it_samples_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(tmp_path, "grpo_smollm2_cpu", SYNCHRONOUS)
    read_until(process, "step 1/2")
    tag, children = tag_of(process.pid), children_of(process.pid)
    code, output = finish(process)
    assert code == 0, output
    run = tmp_path / "runs" / "exp_001"
    before, *steps = metrics(run)
    assert (before["step"], before["validation/num_samples"], before["validation/num_failed"]) == (0, 19.0, 0.0)
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["train/max_logprob_diff"] <= 1e-4
        assert line["train/num_nonfinite_logprob_gaps"] == 0.0
        assert line["train/num_valid_rollouts"] == 64.0
    assert [versions(run, step) for step in (1, 2)] == [{0}, {1}]
    assert_nothing_left(tag, children)


def test_an_asynchronous_run_overlaps_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    process = start(tmp_path, "async_grpo_smollm2_cpu", ASYNCHRONOUS)
    read_until(process, "step 3/4")
    tag, children = tag_of(process.pid), children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert_nothing_left(tag, children)
    run = tmp_path / "runs" / "exp_001"
    # Version v trains step v + 1.
    assert [step - 1 - min(versions(run, step)) for step in (1, 2, 3)] == [0, 1, 1]
    assert [line["train/staleness_max"] for line in metrics(run)[:3]] == [0.0, 1.0, 1.0]
    assert sum(line["performance/overlap_s"] for line in metrics(run)) > 0.0

    process = start(tmp_path, "async_grpo_smollm2_cpu", ASYNCHRONOUS)
    code, output = finish(process)
    assert code == 0, output
    assert "restoring the checkpoint of step" in output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["exp_001"]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    groups = [
        sorted({json.loads(line)["group_id"] for line in (run / "rollouts" / f"step_{step}.jsonl").open()})
        for step in range(1, 5)
    ]
    assert groups == [list(range(8 * step, 8 * step + 8)) for step in range(4)]
