"""`tandem eval` from end to end on the tiny model: exact counts, files, a trained run, and an end by a signal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl.core.metric_registry import check_metric_names
from tests.support.leftovers import assert_nothing_left, children_of, tag_of
from tests.support.tandem_command import run_tandem
from tests.support.tiny_run import finish, make_tiny_run, read_until

SAMPLED = ["eval.num_generations=4", "eval.k=[1,2,4]", "eval.temperature=1.0"]
REWARDS = "tests.support.tiny_rewards"


def results(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return loaded


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_an_evaluation_counts_exactly_and_its_numbers_follow_from_its_samples(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    prompts = ["0:", "1:", "2:", "3:", "x" * 30]
    rows = [{"prompt": prompt, "answer": "", "task": "ab"[index % 2]} for index, prompt in enumerate(prompts)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", "--config", str(run.config), *SAMPLED, "eval.correct_reward=0.2"]
    result = run_tandem(command, tmp_path)
    assert result.exit_code == 0, result.stderr
    folder = run.log_dir / "eval_001"
    found, lines = results(folder), samples(folder)
    overall = found["tasks"]["all"]
    assert sorted(found["tasks"]) == ["all", "reward", "reward/a", "reward/b"]
    assert (overall["counts"]["prompts"], overall["counts"]["asked"], overall["counts"]["scored"]) == (4, 16, 16)
    assert list(found["overlong_rows"]["reward"]) == ["heldout:5"]
    assert overall["counts"]["skipped_prompts"] == 1
    check_metric_names(f"eval/{name}" for name in overall["metrics"])
    assert len(lines) == 16
    assert overall["metrics"]["avg@4"] == sum(line["reward"] for line in lines) / 16
    assert abs(overall["metrics"]["pass@1"] - sum(line["is_correct"] for line in lines) / 16) < 1e-12
    right = {line["prompt_id"] for line in lines if line["is_correct"]}
    assert overall["metrics"]["pass@4"] == len(right) / 4
    assert overall["counts"]["truncated"] == sum(line["is_truncated"] for line in lines)
    assert found["sampling"]["temperature"] == 1.0
    assert found["config"]["eval"]["k"] == [1, 2, 4]
    assert len(found["model"]["weights_sha256"]) == 64
    assert "reward/a" in result.stdout and "pass@4" in result.stdout and str(folder / "results.json") in result.stdout

    again = run_tandem([*command, "--output", str(tmp_path / "mine")], tmp_path)
    assert again.exit_code == 0, again.stderr
    assert samples(tmp_path / "mine") == lines


def test_a_trained_run_is_evaluated_by_its_own_configuration(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.run()
    before = run_tandem(["eval", "--config", str(run.config), "--output", "before"], tmp_path)
    after = run_tandem(["eval", "--checkpoint", str(run.log_dir / "exp_001"), "--output", "after"], tmp_path)
    assert (before.exit_code, after.exit_code) == (0, 0), before.stderr + after.stderr
    untrained, trained = results(tmp_path / "before"), results(tmp_path / "after")
    assert trained["model"]["name"].endswith("exp_001/checkpoints/step_3/policy/model")
    assert untrained["model"]["weights_sha256"] != trained["model"]["weights_sha256"]
    assert trained["tasks"]["reward"]["metrics"]["avg@1"] > untrained["tasks"]["reward"]["metrics"]["avg@1"]
    assert trained["tasks"]["reward"]["counts"]["asked"] == 3


def test_failed_rewards_are_counted_and_the_evaluation_ends(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=f"{REWARDS}:always_raises")
    result = run_tandem(["eval", "--config", str(run.config)], tmp_path)
    assert result.exit_code == 0, result.stderr
    counts = results(run.log_dir / "eval_001")["tasks"]["reward"]["counts"]
    assert (counts["asked"], counts["scored"], counts["failed"]) == (3, 0, 3)
    assert "the judge is broken" in result.stdout


def test_ctrl_c_ends_an_evaluation_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=f"{REWARDS}:slow_share_of_letters")
    rows = [{"prompt": f"{index}:", "answer": ""} for index in range(200)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = subprocess.Popen(
        [sys.executable, "-m", "rl", "eval", "--config", str(run.config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    read_until(process, "evaluated 20 of 200")
    tag, children = tag_of(process.pid), children_of(process.pid)
    os.kill(process.pid, signal.SIGINT)
    code, _ = finish(process)
    assert code == 130
    assert_nothing_left(tag, children)
    assert not (run.log_dir / "eval_001" / "results.json").exists()
