"""A complete run with the tiny model: its files, its configuration, and ways to start it.

    setup = make_tiny_run(tmp_path)
    report = setup.run(["grpo.max_num_steps=2"])

Runs in this process, or as `python -m tests.support.tiny_run CONFIG RESUME [key=value]...` in a process that a test
can kill.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.controller.load import load_config
from rl.controller.options import RunOptions
from rl.controller.report import RunReport
from rl.controller.run import run_training
from tests.support.tiny_model import make_tiny_model

DEADLINE_S = 240
_TIMING = ("time_s", "timing/", "performance/", "refit/seconds", "refit/digest_share")


@dataclass(frozen=True)
class TinyRun:
    """One configuration on disk."""

    config: Path
    log_dir: Path

    def run(self, overrides: Sequence[str] = (), resume: str = "auto") -> RunReport:
        """Train in this process."""
        master, tree = load_config(self.config, list(overrides))
        return run_training(master, tree, RunOptions(resume=resume, config_name="tiny"))

    def start(self, overrides: Sequence[str] = (), resume: str = "auto") -> "subprocess.Popen[str]":
        """Train in another process, in its own session."""
        command = [sys.executable, "-m", "tests.support.tiny_run", str(self.config), resume, *overrides]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def metrics(self, name: str = "exp_001") -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl."""
        text = (self.log_dir / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def status(self, name: str = "exp_001") -> str:
        """The state of a run."""
        return str(json.loads((self.log_dir / name / "status.json").read_text())["state"])


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    """Read the output until a line holds `text`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"the run ended without '{text}':\n{''.join(seen)}")


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for the end; exit status and the rest of the output."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def assert_same_training(left: Path, right: Path) -> None:
    """Two run folders hold the same steps: the same tokens and rewards, and the same metrics.

    Metrics that the clock decides are left out. The others may differ by float32 noise, because the batch in which a
    generator computes a token depends on when requests arrive.
    """
    steps = [_untimed(folder) for folder in (left, right)]
    assert [line["step"] for line in steps[0]] == [line["step"] for line in steps[1]]
    for first, second in zip(*steps, strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-5)
    names = sorted(path.name for path in (left / "rollouts").iterdir())
    assert names == sorted(path.name for path in (right / "rollouts").iterdir())
    for name in names:
        assert _sampled(left / "rollouts" / name) == _sampled(right / "rollouts" / name)


def _untimed(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not _is_timing(key)} for line in lines]


def _is_timing(key: str) -> bool:
    return key.startswith(_TIMING) or (key.startswith("refit/") and key.endswith("_s"))


def _sampled(file: Path) -> list[tuple[Any, ...]]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [(r["rollout_id"], r["prompt_id"], r["token_ids"], r["reward"], r["weight_versions"]) for r in records]


def make_tiny_run(
    folder: Path,
    reward: str = "tests.support.tiny_rewards:share_of_letters",
    changes: dict[str, dict[str, Any]] | None = None,
) -> TinyRun:
    """Write model, data and configuration into `folder`.

    Args:
        folder: A temporary folder.
        reward: Reward function.
        changes: Values that replace those of a section, by section.
    """
    model = make_tiny_model(folder / "model")
    rows = [{"prompt": f"say {index:02d}:", "answer": "x"} for index in range(24)]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = folder / "heldout.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"tell {index}:", "answer": "x"}) + "\n" for index in range(3)))
    log_dir = folder / "runs"
    sections: dict[str, dict[str, Any]] = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 3, "val_period": 0},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 32,
            "optimizer": {"kwargs": {"lr": 1.0e-2, "weight_decay": 0.0}},
            "generation": {"backend": "hf", "max_new_tokens": 6},
        },
        "data": {
            "train": {"kind": "jsonl", "path": str(data)},
            "validation": {"kind": "jsonl", "path": str(held_out)},
            "env_name": "reward",
            "prompt_format": "raw",
        },
        "env": {"reward": {"kind": "function", "target": reward, "timeout_s": 20.0}},
        "cluster": {"kind": "local", "threads": {"policy": 1, "generation": 1}},
        "async_rl": {
            "sampler": {"name": "in_order", "max_lookahead_versions": 0},
            "rollout_failure": {"backoff_base_s": 0.05},
        },
        "logger": {"log_dir": str(log_dir), "tensorboard_enabled": False, "console": "plain"},
        "checkpointing": {"save_period": 2, "metric_name": None},
    }
    for name, values in (changes or {}).items():
        sections[name] = {**sections.get(name, {}), **values}
    config = folder / "tiny.yaml"
    config.write_text(yaml.safe_dump(sections))
    return TinyRun(config, log_dir)


def main(arguments: Sequence[str]) -> int:
    """Run a configuration, with the exit codes of the command line."""
    path, resume, *overrides = arguments
    report = TinyRun(Path(path), Path()).run(overrides, resume)
    return 130 if report.interrupted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
