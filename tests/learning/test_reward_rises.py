"""The reward rises: the whole loop on the tiny model with a dense reward, and the controls that must not rise."""

from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run

STEPS, MARGIN = 30, 0.4
RECIPE = [
    f"grpo.max_num_steps={STEPS}",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=8",
    "checkpointing.enabled=false",
    "checkpointing.export_hf=false",
    "logger.log_rollouts=false",
]


def rise(folder: Path, overrides: list[str]) -> float:
    """Mean reward of the last five steps minus that of the first two."""
    run = make_tiny_run(folder)
    run.run([*RECIPE, *overrides])
    rewards = [line["train/reward"] for line in run.metrics()]
    assert len(rewards) == STEPS
    return sum(rewards[-5:]) / 5 - sum(rewards[:2]) / 2


@pytest.mark.parametrize("seed", [1, 2])
def test_the_reward_rises(tmp_path: Path, seed: int) -> None:
    assert rise(tmp_path, [f"grpo.seed={seed}"]) > MARGIN


def test_the_reward_rises_when_rollouts_run_one_version_ahead(tmp_path: Path) -> None:
    ahead = ["async_rl.sampler.max_lookahead_versions=1", "loss_fn.use_importance_sampling_correction=true"]
    assert rise(tmp_path, ["grpo.seed=1", *ahead]) > MARGIN


@pytest.mark.parametrize("control", ["policy.optimizer.kwargs.lr=0", "grpo.shuffle_advantages=true"])
def test_it_does_not_rise_without_learning_or_with_shuffled_advantages(tmp_path: Path, control: str) -> None:
    assert abs(rise(tmp_path, ["grpo.seed=1", control])) < MARGIN / 2
