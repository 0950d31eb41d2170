"""The dry run finds what is missing before anything heavy starts."""

from pathlib import Path

import pytest

from rl.controller.dry_run import dry_run
from rl.controller.load import load_config
from rl.core.config_paths import find_config


def _problems(*overrides: str) -> dict[str, str]:
    config, _ = load_config(find_config("grpo_smollm2_cpu"), overrides)
    return {finding.name: finding.problem for finding in dry_run(config, "x") if finding.problem is not None}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_default_run_passes() -> None:
    assert _problems() == {}


def test_a_reward_function_is_found_in_the_users_folder_without_running_it(folder: Path) -> None:
    source = "def score(prompts, completions):\n    return [0.0]\nraise SystemExit('it ran')\n"
    (folder / "my_rewards.py").write_text(source)
    mine = "env.math={_override_: true, kind: function, target: 'my_rewards:%s'}"
    assert _problems(mine % "score") == {}
    assert "defines no 'scor'" in _problems(mine % "scor")["reward"]
    assert "no module 'your_rewards'" in _problems((mine % "score").replace("my_", "your_"))["reward"]


def test_a_column_that_a_reward_function_needs_and_the_rows_lack_is_found(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"question": "1+1?", "sum": 2, "level": 1}\n')
    (folder / "my_rewards.py").write_text(
        "def right(prompts, completions, answer, level): ...\n"
        "async def wrong(completions, answers, *, level, hard, bonus=1): ...\n"
        "def any(completions, answers=None, **columns): ...\n"
    )
    rows = "data.train={_override_: true, kind: jsonl, path: rows.jsonl, prompt_key: question, answer_key: sum}"
    mine = "env.math={_override_: true, kind: function, target: 'my_rewards:%s'}"
    off = ["data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    off += ["checkpointing.metric_name=null", "data.prompt_format=chat"]
    assert _problems(rows, mine % "right", *off) == _problems(rows, mine % "any", *off) == {}
    assert _problems(rows, mine % "wrong", *off) == {
        "reward": "env.math.target: my_rewards:wrong needs the column(s) answers, hard; data.train has answer, level "
        "beside prompts and completions"
    }


def test_a_logger_that_is_not_installed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install wandb" in _problems("logger.tensorboard_enabled=false", "logger.wandb_enabled=true")["loggers"]


def test_a_place_for_runs_that_cannot_be_written_is_found(folder: Path) -> None:
    (folder / "file").write_text("")
    assert "cannot write to" in _problems("logger.log_dir=file/runs")["run folder"]


def test_a_disk_that_is_too_small_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.controller.disk.checkpoint_bytes", lambda *_: 10**18)
    assert "MiB free" in _problems()["disk"]
    assert _problems("checkpointing.enabled=false") == {}


def test_a_missing_model_is_one_problem() -> None:
    assert list(_problems("policy.model_name=./nowhere")) == ["model"]


def test_a_model_on_the_hub_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert _problems("policy.model_name=Qwen/Qwen2.5-1.5B-Instruct") == {}


def test_a_context_beyond_the_models_is_found_in_its_files(folder: Path) -> None:
    (folder / "config.json").write_text('{"max_position_embeddings": 32}')
    problems = _problems(f"policy.model_name={folder}", "policy.max_total_sequence_length=64")
    assert "exceeds the model's context of 32 tokens" in problems["model"]


def test_a_target_of_resume_that_is_no_run_is_found(folder: Path) -> None:
    config, _ = load_config(find_config("grpo_smollm2_cpu"), [])
    findings = {finding.name: finding.problem for finding in dry_run(config, "x", resume=str(folder))}
    assert "not a run folder" in str(findings["resume"])


def test_a_damaged_model_is_one_problem(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    problems = _problems(f"policy.model_name={folder}")
    assert list(problems) == ["model"]
    assert "model.safetensors is damaged" in problems["model"]


def test_an_address_for_refits_that_is_another_hosts_is_found() -> None:
    section = "policy.generation.refit_cfg"
    for host in ("192.0.2.1", "2001:db8::1", "no-such-host.invalid", "a" * 70):
        problems = _problems(f"{section}.transport=tcp", f"{section}.host='{host}'")
        assert list(problems) == ["refit"]
        assert f"{section}.host={host}: the trainer cannot listen there: " in problems["refit"]
    assert _problems(f"{section}.transport=tcp", f"{section}.host=127.0.0.1") == {}
    # The trainer may be on another node: it says so itself when it opens its links.
    assert _problems("cluster.num_nodes=2", f"{section}.host=192.0.2.1") == {}
