"""Tests of rl.controller.eval_plan: which model and which data are meant, and what is refused at once."""

import json
import shutil
from pathlib import Path

import pytest

from rl.controller.eval_plan import EvalOptions, model_folder, plan_evaluation, run_config
from rl.controller.load import load_config
from rl.core.errors import ConfigError
from tests.support.tiny_run import make_tiny_run


def options(checkpoint: Path | None = None, output: Path | None = None) -> EvalOptions:
    return EvalOptions("tiny", checkpoint, output)


def make_run_folder(folder: Path, model: Path, *places: str) -> Path:
    """A run folder with the model at `places`; checkpoints are sealed as complete ones are."""
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"state": "finished", "fingerprint": "f"}))
    (folder / "config.yaml").write_text("{}\n")
    for place in places:
        shutil.copytree(model, folder / place)
    return folder


def test_the_model_and_the_validation_data_of_the_configuration_are_the_default(tmp_path: Path) -> None:
    config, _ = load_config(make_tiny_run(tmp_path).config, [])
    plan = plan_evaluation(config, options())
    assert plan.config is config
    assert list(plan.tasks) == ["reward"]


def test_an_export_is_evaluated_where_a_run_has_no_checkpoint(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    config, _ = load_config(run.config, [])
    folder = make_run_folder(tmp_path / "exp_001", tmp_path / "model", "export")
    plan = plan_evaluation(config, options(folder))
    assert plan.config.policy.model_name == str(folder / "export")
    assert plan.config.policy.generation is config.policy.generation


def test_a_checkpoint_and_a_model_folder_can_be_named_themselves(tmp_path: Path) -> None:
    make_tiny_run(tmp_path)
    step = "checkpoints/step_2"
    folder = make_run_folder(tmp_path / "exp_001", tmp_path / "model", f"{step}/policy/model", "export")
    assert model_folder(folder / step) == folder / step / "policy" / "model"
    assert model_folder(tmp_path / "model") == tmp_path / "model"
    for given in (folder, folder / step, folder / "export"):
        assert run_config(given) == folder / "config.yaml"
    assert run_config(tmp_path / "model") is None
    assert run_config(None) is None


def test_results_stand_beside_the_run_wherever_it_is_evaluated_from(tmp_path: Path) -> None:
    config, _ = load_config(make_tiny_run(tmp_path).config, ["logger.log_dir=null"])
    folder = make_run_folder(tmp_path / "exp_001", tmp_path / "model", "export")
    assert plan_evaluation(config, EvalOptions("config", folder, None, run=folder)).parent == tmp_path
    assert plan_evaluation(config, EvalOptions("tiny", None, None)).parent == Path("results/tiny")


def test_what_does_not_exist_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    config, _ = load_config(run.config, [])
    with pytest.raises(ConfigError, match="nowhere is no run folder, no checkpoint of one and no Hugging Face folder"):
        plan_evaluation(config, options(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="this run has neither a complete checkpoint nor an export"):
        plan_evaluation(config, options(make_run_folder(tmp_path / "exp_001", tmp_path / "model")))
    with pytest.raises(ConfigError, match=r"--output .* exists"):
        plan_evaluation(config, options(output=tmp_path))
    (tmp_path / "heldout.jsonl").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        plan_evaluation(config, options())


def test_there_must_be_data(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    config, _ = load_config(run.config, ["data.validation=null"])
    with pytest.raises(ConfigError, match=r"set data.validation, or eval.tasks.<name>.dataset"):
        plan_evaluation(config, options())


def test_more_samples_than_memory_holds_are_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.num_generations=100000000: must be int .*<= 10000"):
        load_config(make_tiny_run(tmp_path).config, ["eval.num_generations=100000000"])
