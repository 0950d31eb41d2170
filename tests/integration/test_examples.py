"""The examples of the documentation run as they stand, but for the model, which is the tiny one here."""

import json
import shutil
from pathlib import Path

from tests.support.tandem_command import run_tandem
from tests.support.tiny_model import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
OVERRIDES = [
    "policy.generation.backend=hf",
    "cluster.kind=local",
    "policy.generation.max_new_tokens=4",
    "grpo.max_num_steps=2",
]


def test_ones_own_prompts_and_reward_train(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "own_reward", tmp_path / "own_reward"))
    model = make_tiny_model(tmp_path / "model")
    run = run_tandem(["train", "--config", "run.yaml", f"policy.model_name={model}", *OVERRIDES], folder)
    assert run.exit_code == 0, run.stderr
    lines = (folder / "results" / "run" / "exp_001" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["train/num_valid_rollouts"] == 32.0 for step in steps)
