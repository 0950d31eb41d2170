"""Whole runs with the tiny model, without Ray and vLLM: what stands on disk, and what survives which end."""

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.core.errors import ConfigError, FatalError
from rl.generation.hf import HfWorker
from rl.telemetry.rollout_log import read_rollouts
from rl.weights.report import RefitError
from rl.weights.transport import RefitStart
from tests.support.tiny_run import TinyRun, assert_same_training, finish, make_tiny_run, read_until

REWARDS = "tests.support.tiny_rewards"
SLOW = f"{REWARDS}:slow_share_of_letters"


def test_a_run_leaves_metrics_rollouts_checkpoints_and_an_export(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    report = run.run(
        ["grpo.val_at_start=true", "grpo.val_at_end=true", "grpo.val_num_generations=2", "grpo.val_temperature=1.0"]
    )
    folder = report.run_folder
    assert (folder.name, report.steps, report.interrupted, run.status()) == ("exp_001", 3, False, "finished")
    lines = run.metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["validation/num_samples"] == lines[3]["validation/num_samples"] == 6.0
    expected = {
        "time_s", "train/reward", "train/loss", "train/grad_norm", "train/lr", "train/max_logprob_diff",
        "train/token_mult_prob_error", "train/staleness_mean", "train/staleness_max", "train/advantages/mean",
        "train/baseline_reward/pct_mixed", "train/total_num_tokens", "train/num_reward_errors",
        "train/num_skipped_prompts",
        "train/dropped_prompt_groups", "timing/train/total_step_time", "timing/train/exposed_generation",
        "timing/train/policy_training", "timing/train/weight_sync", "performance/tokens_per_sec",
        "performance/samples_per_sec", "performance/overlap_s", "refit/seconds",
    }  # fmt: skip
    assert expected - lines[1].keys() == set()
    assert all(line["train/max_logprob_diff"] <= 1e-4 for line in lines[1:])
    assert [line["step"] for line in lines if "timing/train/checkpointing" in line] == [2, 3]
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "step_2.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
    assert {rollout["weight_versions"][0][0] for rollout in rollouts} == {1}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_2", "step_3"]
    assert (folder / "config.yaml").is_file()
    assert (folder / "run.log").is_file()
    check_export(folder)


def check_export(folder: Path) -> None:
    """The export loads in Hugging Face's own way and computes what the last checkpoint computes."""
    tokens = torch.arange(20).unsqueeze(0)
    exported = AutoModelForCausalLM.from_pretrained(folder / "export")(tokens).logits
    saved = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step_3" / "policy" / "model")(tokens).logits
    torch.testing.assert_close(exported, saved, rtol=0.0, atol=0.0)


def test_a_lookahead_of_one_gives_a_staleness_of_one_and_overlaps(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=SLOW)
    run.run(
        [
            "async_rl.sampler.max_lookahead_versions=1",
            "loss_fn.use_importance_sampling_correction=true",
            "grpo.max_num_steps=4",
            "checkpointing.enabled=false",
        ]
    )
    lines = run.metrics()
    assert [line["train/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert [line["train/staleness_mean"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert sum(line["performance/overlap_s"] for line in lines) > 0.0


def test_running_ahead_of_weights_that_stand_still_is_the_synchronous_run(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    still = ["policy.optimizer.kwargs.lr=0", "loss_fn.use_importance_sampling_correction=true"]
    for lookahead in (0, 1):
        ahead = f"async_rl.sampler.max_lookahead_versions={lookahead}"
        run.run([*still, ahead, "checkpointing.enabled=false"], resume="never")
    names = ("reward", "loss", "grad_norm", "advantages/max", "probs_ratio", "sampling_importance_ratio")
    steps = [[[line[f"train/{name}"] for name in names] for line in run.metrics(f"exp_00{i}")] for i in (1, 2)]
    assert steps[0] == [pytest.approx(step, rel=1e-5, abs=1e-6) for step in steps[1]]
    files = [[run.log_dir / f"exp_00{i}" / "rollouts" / f"step_{step}.jsonl" for step in (1, 2, 3)] for i in (1, 2)]
    tokens = [[_trained_tokens(file) for file in each] for each in files]
    assert tokens[0] == tokens[1]
    assert run.metrics("exp_002")[-1]["train/staleness_max"] == 1.0


def _trained_tokens(file: Path) -> list[tuple[int, ...]]:
    return [turn.completion.tokens for group in read_rollouts(file).groups for r in group.rollouts for turn in r.turns]


def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    for seed in (1, 1, 2):
        run.run([f"grpo.seed={seed}", "checkpointing.enabled=false"], resume="never")
    first, second, other = (run.log_dir / f"exp_00{number}" for number in (1, 2, 3))
    assert_same_training(first, second)
    with pytest.raises(AssertionError):
        assert_same_training(first, other)


def test_a_finished_run_started_again_starts_a_new_one_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_tiny_run(tmp_path)
    run.run(["grpo.max_num_steps=1"])
    capsys.readouterr()
    report = run.run(["grpo.max_num_steps=1"])
    assert report.run_folder.name == "exp_002"
    assert "is finished; starting a new run" in capsys.readouterr().out


def test_a_finished_run_with_nothing_left_is_left_as_it_is(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.run()
    folder = run.log_dir / "exp_001"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "run.lock"}
    report = run.run(resume=str(folder))
    assert (report.steps, report.interrupted) == (3, False)
    assert "it has all the 3 steps asked for; nothing was done" in report.note
    with pytest.raises(ConfigError, match="this run already has 3 steps, 2 were asked for"):
        run.run(["grpo.max_num_steps=2"], resume=str(folder))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "run.lock"} == before


def test_a_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.run()
    folder = run.log_dir / "exp_001"
    weights = next((folder / "checkpoints" / "step_3" / "policy").rglob("*.safetensors"))
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(
        FatalError, match=r"step_3 cannot be restored, part 'policy': .*move it away to go on from step"
    ):
        run.run(["grpo.max_num_steps=4"], resume=str(folder))


def test_a_finished_run_that_is_extended_is_unfinished_until_it_ends(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=SLOW)
    run.run(["grpo.max_num_steps=1"])
    folder = run.log_dir / "exp_001"
    process = run.start(["grpo.max_num_steps=9"], resume=str(folder))
    read_until(process, "step 2/9")
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert run.status() == "unfinished"
    assert run.run(["grpo.max_num_steps=4"]).run_folder == folder
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_a_run_without_optimizer_state_starts_anew_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "checkpointing": {"save_period": 1, "metric_name": None, "save_optimizer": False}
    }
    run = make_tiny_run(tmp_path, reward=SLOW, changes=changes)
    process = run.start(["grpo.max_num_steps=9"])
    read_until(process, "step 3/9")
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert run.run(["grpo.max_num_steps=2"]).run_folder.name == "exp_002"
    assert "has no optimizer state (checkpointing.save_optimizer=false)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no optimizer state .* from its weights with policy.model_name=") as refused:
        run.run(["grpo.max_num_steps=9"], resume=str(run.log_dir / "exp_001"))
    assert Path(str(refused.value).rpartition("=")[2], "config.json").is_file()


def test_ten_steps_equal_five_a_kill_and_five(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"checkpointing": {"save_period": 5, "metric_name": None}}
    run = make_tiny_run(tmp_path, reward=SLOW, changes=changes)
    run.run(["grpo.max_num_steps=10"], resume="never")

    killed = TinyRun(run.config, tmp_path / "killed")
    overrides = ["grpo.max_num_steps=10", f"logger.log_dir={killed.log_dir}"]
    process = killed.start(overrides)
    read_until(process, "step  7/10")
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert [line["step"] for line in killed.metrics()][:7] == [1, 2, 3, 4, 5, 6, 7]
    assert killed.status() == "unfinished"

    report = killed.run(overrides)
    assert report.run_folder.name == "exp_001"
    assert [line["step"] for line in killed.metrics()] == list(range(1, 11))
    assert_same_training(run.log_dir / "exp_001", report.run_folder)
    assert killed.status() == "finished"


def test_an_asynchronous_run_resumes_with_the_prompts_that_no_step_has_trained(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=SLOW)
    overrides = [
        "grpo.max_num_steps=6",
        "async_rl.sampler.max_lookahead_versions=2",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    process = run.start(overrides)
    read_until(process, "step 3/6")
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    run.run(overrides)
    folder = run.log_dir / "exp_001" / "rollouts"
    files = [folder / f"step_{step}.jsonl" for step in range(1, 7)]
    records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [sorted({r["group_id"] for r in step}) for step in records] == [[2 * i, 2 * i + 1] for i in range(6)]
    prompts = [record["prompt_id"] for step in records for record in step[::4]]
    assert len(set(prompts)) == len(prompts) == 12
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert max(line["train/staleness_max"] for line in lines) <= 2.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly_and_it_can_go_on(tmp_path: Path, number: signal.Signals) -> None:
    changes: dict[str, dict[str, Any]] = {"checkpointing": {"save_period": 100, "metric_name": None}}
    run = make_tiny_run(tmp_path, reward=SLOW, changes=changes)
    process = run.start(["grpo.max_num_steps=8"])
    read_until(process, "step 3/8")
    process.send_signal(number)
    code, output = finish(process)
    assert code == 130, output
    assert "; the same command goes on with this run" in output
    done = [line["step"] for line in run.metrics()]
    assert [path.name for path in (run.log_dir / "exp_001" / "checkpoints").iterdir()] == [f"step_{done[-1]}"]
    run.run(["grpo.max_num_steps=8"])
    assert [line["step"] for line in run.metrics()] == list(range(1, 9))


def test_a_refit_that_fails_ends_the_run_and_says_where_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    right = HfWorker.start_update

    def start_update(worker: HfWorker, begin: RefitStart) -> None:
        if begin.version == 3:
            raise RuntimeError("the engine is worn out")
        right(worker, begin)

    run, overrides = make_tiny_run(tmp_path), ["grpo.max_num_steps=4"]
    monkeypatch.setattr(HfWorker, "start_update", start_update)
    message = r"refit of version 3 failed at start in attempt 2: generation\[0\]: .*worn out"
    with pytest.raises(RefitError, match=message):
        run.run(overrides)
    assert "failed; the same command goes on from the checkpoint of step 2" in capfd.readouterr().out
    with pytest.raises(RefitError):
        run.run(overrides, resume="never")
    assert "the same command" not in capfd.readouterr().out, "it would start another run"
    monkeypatch.undo()
    assert run.run(overrides, resume=str(run.log_dir / "exp_001")).steps == 4
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_a_signal_ends_a_set_up_that_blocks_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_tiny_run(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "SlowTokenizer", "auto_map": {"AutoTokenizer": [None, "slow.SlowTokenizer"]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "model" / "slow.py").write_text("import time\n\nprint('loading')\ntime.sleep(3600)\n")
    process = run.start(["policy.trust_remote_code=true"])
    read_until(process, "loading")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "interrupted after step 0" in output
    assert time.monotonic() - start < 15.0


def test_two_runs_at_once_have_different_folders(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=SLOW)
    processes = [run.start(), run.start()]
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    assert sorted(path.name for path in run.log_dir.iterdir()) == ["exp_001", "exp_002"]
    assert_same_training(run.log_dir / "exp_001", run.log_dir / "exp_002")


@pytest.mark.parametrize(
    ("reward", "counter"),
    [("raises", "num_reward_errors"), ("always_raises", "num_reward_errors"), ("returns_none", "num_reward_invalid"),
     ("hangs", "num_reward_timeouts")],
)  # fmt: skip
def test_a_faulty_reward_keeps_the_run_alive_and_is_counted_apart_from_zeros(
    tmp_path: Path, reward: str, counter: str
) -> None:
    target = f"{REWARDS}:{reward}"
    env = {"reward": {"kind": "function", "target": target, "timeout_s": 0.5 if reward == "hangs" else 20.0}}
    run = make_tiny_run(tmp_path, reward=target, changes={"env": env})
    report = run.run(["checkpointing.enabled=false", "grpo.max_num_steps=3"])
    lines = run.metrics()
    assert report.steps == len(lines) == 3
    assert sum(line[f"train/{counter}"] for line in lines) > 0
    assert sum(line["train/num_invalid_rollouts"] for line in lines) == sum(line[f"train/{counter}"] for line in lines)
    assert all(line["train/num_valid_rollouts"] + line["train/num_invalid_rollouts"] == 8 for line in lines)


def test_a_disk_that_fills_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, reward=SLOW)
    process = run.start(["grpo.max_num_steps=8"])
    read_until(process, "step 3/8")
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    checkpoints = run.log_dir / "exp_001" / "checkpoints"
    before = {path: path.read_bytes() for path in (checkpoints / "step_2").rglob("*") if path.is_file()}
    # No file may grow further, as on a full disk: the weights still fit, the optimizer's state does not.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with pytest.raises(FatalError, match=r"saving the checkpoint of step 4 failed.*step 2 is intact"):
            run.run(["grpo.max_num_steps=8", "policy.generation.refit_cfg.bucket_mib=0.02"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in (checkpoints / "step_2").rglob("*") if path.is_file()} == before
    assert [path.name for path in checkpoints.iterdir()] == ["step_2"]
    run.run(["grpo.max_num_steps=8"])
    assert run.status() == "finished"
