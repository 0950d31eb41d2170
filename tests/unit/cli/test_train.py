"""`tandem train` refuses bad input quickly, and checks without running."""

import os
from pathlib import Path

import pytest

from tests.support.tandem_command import quickest_tandem, run_tandem

QUICK_S = 2.0


def test_a_misspelt_key_in_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# my run\n\ngrpo:\n  num_promts_per_step: 8\n")
    result = quickest_tandem(["train", "--config", "mine.yaml"], tmp_path, QUICK_S)
    assert result.exit_code == 2
    assert result.seconds < QUICK_S
    assert "mine.yaml:4: unknown key grpo.num_promts_per_step; did you mean num_prompts_per_step?" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(os.listdir(tmp_path)) == ["mine.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bad_key=1"], "command line: unknown key bad_key"),
        (["grpo.max_num_steps=abc"], "command line: grpo.max_num_steps=abc: must be int >= 1"),
        (["grpo.max_num_steps=0"], "grpo.max_num_steps=0: must be int >= 1"),
        (["grpo.max_num_steps"], "is not of the form key=value"),
        (["policy.train_global_batch_size=48"], "does not divide the sequences of a step"),
        (["--config", "grpo_smolm2_cpu"], "did you mean grpo_smollm2_cpu?"),
        (["--config", "grpo_tiny_cpu"], "policy.model_name must be set"),
        (["--resume", "results/nowhere"], "--resume results/nowhere is neither auto, never, nor an existing"),
        (["--resume", ""], "--resume '' is neither auto, never, nor an existing"),
        (["--", "grpo.sed=1"], "did you mean seed?"),
        (["--dry-run", "policy.model_name=./nowhere"], "policy.model_name=./nowhere"),
        (["--dry-run", "policy.model_name=package:nowhere/x.gguf"], "the package nowhere is not installed"),
        (["--dry-run", "data.train={_override_: true, kind: jsonl, path: no.jsonl}"], "no.jsonl does not exist"),
    ],
)
def test_bad_input_is_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run_tandem(["train", *arguments], tmp_path)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_dry_run_of_the_default_passes_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    result = quickest_tandem(["train", "--dry-run"], tmp_path, QUICK_S)
    assert result.exit_code == 0, result.stderr
    assert result.seconds < QUICK_S
    assert result.stdout.splitlines()[-1] == "ok    grpo_smollm2_cpu can run"
    assert os.listdir(tmp_path) == []


def test_a_dry_run_shows_a_dataset_without_its_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    data = "{_override_: true, kind: jsonl, path: rows.jsonl}"
    result = run_tandem(["train", "--dry-run", f"data.train={data}"], tmp_path)
    assert result.exit_code == 2
    for part in ("rows.jsonl", "prompt", "question", "1+1"):
        assert part in result.stderr


def test_all_problems_of_a_dry_run_are_listed_at_once(tmp_path: Path) -> None:
    overrides = ["policy.model_name=./nowhere", "data.train={_override_: true, kind: jsonl, path: no.jsonl}"]
    result = run_tandem(["train", "--dry-run", *overrides], tmp_path)
    assert result.exit_code == 2
    assert "model: policy.model_name=./nowhere" in result.stderr
    assert "training data: the dataset no.jsonl" in result.stderr
    assert "ok    reward" in result.stdout


def test_unknown_keys_can_be_ignored_and_are_listed(tmp_path: Path) -> None:
    result = run_tandem(["train", "--dry-run", "--allow-unknown-keys", "grpo.sed=1"], tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "ignored unknown key grpo.sed (command line)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy.model_name=./nowhere"], "policy.model_name=./nowhere"),
        (["data.train={_override_: true, kind: jsonl, path: no.jsonl}"], "no.jsonl does not exist"),
        (["env.math={_override_: true, kind: function, target: 'my_rewards:score'}"], "no module 'my_rewards'"),
        (["logger.log_dir=model/config.json/runs"], "cannot write to"),
        (["policy.max_total_sequence_length=100000000"], "exceeds the model's context"),
        (["--resume", "."], "not a run folder"),
    ],
)
def test_a_run_that_cannot_begin_is_refused_at_once_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 2048}')
    model = [] if arguments[0].startswith("policy.model_name") else ["policy.model_name=model"]
    result = quickest_tandem(["train", *model, *arguments], tmp_path, QUICK_S)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.seconds < QUICK_S
    assert os.listdir(tmp_path) == ["model"]
