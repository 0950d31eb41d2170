"""Each shipped recipe makes two whole steps with the tiny model: model, engine, cluster and reward are replaced."""

import json
import math
from pathlib import Path

import pytest

from rl.controller.load import load_config
from rl.controller.options import RunOptions
from rl.controller.run import run_training
from rl.core.config_paths import shipped_folder
from tests.support.tiny_model import make_tiny_model

# Parts that others start from, and a run for two GPUs whose data comes from the hub.
PARTS = {"base", "smollm2_cpu", "grpo_math"}
RECIPES = sorted(file.stem for file in shipped_folder().glob("*.yaml") if file.stem not in PARTS)
LETTERS = "tests.support.tiny_rewards:share_of_letters"
CALLS = "tests.support.tiny_rewards:letters_and_length"
# The answers of a random model are never right, so a reward that varies takes the place of the task's own.
REWARDS = {
    "gdpo_smollm2_cpu": [
        f"env.components={{_override_: true, kind: function, target: '{CALLS}', weights: {{letters: 1, length: 1}}}}"
    ],
    "tool_smollm2_cpu": [
        f"env.calculator.scorer={{_override_: true, kind: function, target: '{LETTERS}'}}",
        "env.calculator.answer_prefix=''",
    ],
}
OTHERS = [f"env.math={{_override_: true, kind: function, target: '{LETTERS}'}}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_makes_its_steps(recipe: str, model: Path, tmp_path: Path) -> None:
    overrides = [
        f"policy.model_name={model}",
        "policy.generation.backend=hf",
        "policy.generation.stop_token_ids=null",
        # A character of the task's prompts is a token of the tiny model.
        "policy.max_total_sequence_length=500",
        "cluster.kind=local",
        "cluster.threads={policy: 1, generation: 1}",
        "grpo.max_num_steps=2",
        "grpo.max_val_samples=2",
        f"logger.log_dir={tmp_path}",
        "logger.console=plain",
        "checkpointing.enabled=false",
        *REWARDS.get(recipe, OTHERS),
    ]
    config, tree = load_config(shipped_folder() / f"{recipe}.yaml", overrides)
    report = run_training(config, tree, RunOptions(resume="never", config_name=recipe))
    lines = [json.loads(line) for line in (report.run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert (report.steps, [line["step"] for line in steps]) == (2, [1, 2])
    for line in steps:
        assert all(math.isfinite(value) for value in line.values())
        assert line["train/num_rollouts"] == config.sequences_per_step
        assert line["train/steps_skipped_empty"] == line["train/steps_skipped_nonfinite"] == 0.0
        assert line["train/grad_norm"] > 0.0
