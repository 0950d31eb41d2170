"""Whole tiny runs in which trainer and generators take turns: on a CPU every call is made and moves nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.core.errors import ConfigError
from tests.support.tiny_run import TinyRun, make_tiny_run

TURNS = "policy.generation.colocated=true"
DIRECTIONS = ("generator_out", "trainer_in", "trainer_out", "generator_in")
# What a rollout's own log-probabilities do not enter; those depend on which requests shared a forward pass.
EXACT = ("train/loss", "train/grad_norm", "train/reward", "train/advantages/max", "train/total_num_tokens")


def exact(run: TinyRun, name: str) -> list[list[Any]]:
    return [[line[metric] for metric in EXACT] for line in run.metrics(name)]


def weights(run: TinyRun, name: str) -> dict[str, bytes]:
    folder = run.log_dir / name / "checkpoints" / "step_3" / "policy"
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def sampled(run: TinyRun, name: str) -> list[Any]:
    files = sorted((run.log_dir / name / "rollouts").iterdir())
    return [[json.loads(row)["token_ids"] for row in file.read_text().splitlines()] for file in files]


def test_models_that_take_turns_train_bit_for_bit_as_those_that_do_not(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    for setting in ("policy.generation.colocated=false", TURNS):
        run.run([setting, "policy.generation.num_replicas=2"], resume="never")
    apart, sharing = "exp_001", "exp_002"
    assert exact(run, apart) == exact(run, sharing)
    assert weights(run, apart) == weights(run, sharing) != {}
    assert sampled(run, apart) == sampled(run, sharing)
    assert not [name for line in run.metrics(apart) for name in line if "residency" in name]
    for line in run.metrics(sharing):
        moved = {name: value for name, value in line.items() if name.startswith("residency/")}
        assert set(moved) == {f"residency/{one}_{unit}" for one in DIRECTIONS for unit in ("mib", "s")}
        assert {value for name, value in moved.items() if name.endswith("_mib")} == {0.0}
        assert all(value > 0 for name, value in moved.items() if name.endswith("_s"))
        before_refit = sum(moved[f"residency/{one}_s"] for one in ("generator_out", "trainer_in", "trainer_out"))
        assert before_refit <= line["timing/train/residency"] < line["timing/train/total_step_time"]


def test_a_run_that_takes_turns_resumes_where_it_was(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.run([TURNS], resume="never")
    straight = exact(run, "exp_001")
    run.run([TURNS, "grpo.max_num_steps=2"], resume="never")
    # Taking turns changes no result: the other setting goes on with the same run, and back.
    run.run(["policy.generation.colocated=false", "grpo.max_num_steps=3"], resume=str(run.log_dir / "exp_002"))
    run.run([TURNS, "grpo.max_num_steps=2"], resume="never")
    run.run([TURNS, "grpo.max_num_steps=3"], resume=str(run.log_dir / "exp_003"))
    assert exact(run, "exp_002") == exact(run, "exp_003") == straight
    assert weights(run, "exp_002") == weights(run, "exp_003") == weights(run, "exp_001")


def test_taking_turns_is_refused_beside_a_lookahead_before_anything_starts(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    ahead = ["async_rl.sampler.max_lookahead_versions=1", "loss_fn.use_importance_sampling_correction=true"]
    with pytest.raises(ConfigError, match=r"colocated=true .*versions=1 generates then; set .*versions=0"):
        run.run([TURNS, *ahead])
    assert not run.log_dir.exists()
