"""The `tandem train` command from end to end, on the tiny model in one process: exit codes, output, what is left."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.tandem_command import ROOT, run_tandem
from tests.support.tiny_model import make_tiny_model

TINY = ["train", "--config", "grpo_tiny_cpu", "policy.model_name=tiny"]
DEADLINE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "tiny")
    return tmp_path


def test_a_run_ends_with_0_and_writes_its_folder(folder: Path) -> None:
    result = run_tandem([*TINY, "grpo.max_num_steps=2"], folder)
    assert result.exit_code == 0, result.stderr
    run = folder / "results" / "grpo_tiny_cpu" / "exp_001"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "train/reward" in line] == [1, 2]
    written = {line.split(":")[0].strip(): line for line in (run / "config.yaml").read_text().splitlines()}
    assert written["max_num_steps"].startswith("  max_num_steps: 2 ")
    assert written["max_num_steps"].endswith("# command line")


def test_a_reward_function_of_the_users_folder_scores_a_run(folder: Path) -> None:
    (folder / "letters.py").write_text("def share(text):\n    return text.count('a') / 100 + 0.25\n")
    (folder / "my_rewards.py").write_text(
        "import letters\n\ndef score(completions):\n    return [letters.share(text) for text in completions]\n"
    )
    mine = "env.math={_override_: true, kind: function, target: 'my_rewards:score'}"
    result = run_tandem([*TINY, "grpo.max_num_steps=1", "checkpointing.enabled=false", mine], folder)
    assert result.exit_code == 0, result.stderr
    run = folder / "results" / "grpo_tiny_cpu" / "exp_001"
    (reward,) = [
        line["train/reward"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "train/reward" in line
    ]
    assert 0.25 <= reward < 0.4


def test_a_damaged_model_is_refused_with_2_before_anything_starts(folder: Path) -> None:
    (folder / "tiny" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    result = run_tandem([*TINY, "checkpointing.enabled=false"], folder)
    assert result.exit_code == 2, result.stderr
    assert "model.safetensors is damaged" in result.stderr
    assert not (folder / "results").exists()


def test_ctrl_c_ends_with_130(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "rl", *TINY, "grpo.max_num_steps=100000", "grpo.val_period=0"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        exit_code = process.wait()
        deadline.cancel()
    assert exit_code == 130, rest
    assert "Traceback" not in rest
