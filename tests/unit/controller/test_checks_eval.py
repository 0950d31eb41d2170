"""Tests of rl.controller.checks_eval."""

from pathlib import Path

import pytest

from rl.controller.load import load_config
from rl.core.errors import ConfigError
from rl.core.fingerprint import semantic_fingerprint
from tests.support.tiny_run import make_tiny_run

OWN = "env.own={kind: math}"
TASK = "eval.tasks.sums={dataset: {kind: few_shot_addition}, env_name: nowhere}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.k=[0]"], "every k must be at least 1"),
        (["eval.k=[]"], "eval.k"),
        (["eval.k=[2]"], r"eval.k=\[2\] needs eval.num_generations >= 2, got 1"),
        (["eval.k=[1,1]"], "names a k twice"),
        (["eval.num_generations=4"], "with eval.temperature=0 repeats one greedy sample"),
        (["eval.num_generations=4", "eval.temperature=1", "eval.top_k=1"], "with eval.top_k=1 repeats one greedy"),
        (["eval.top_p=0.9"], "eval.top_p=0.9 has no effect: eval.temperature=0 is greedy"),
        (["eval.top_k=9"], "eval.top_k=9 has no effect"),
        (["eval.max_new_tokens=32"], "leaves no token for a prompt within policy.max_total_sequence_length=32"),
        (
            ["eval.tasks.r={dataset: {kind: reasoning_gym, task: leg_counting}, env_name: own}", OWN],
            "eval.tasks.r.dataset.kind=reasoning_gym with env.own.kind=math: reasoning_gym scores its own prompts only",
        ),
        (["grpo.val_temperature=1", "grpo.val_num_generations=2", "grpo.val_top_k=1"], "repeats one greedy sample"),
        ([TASK], "eval.tasks.sums.env_name=nowhere is not among the environments of env: reward"),
        (["eval.tasks.all={dataset: {kind: few_shot_addition}}"], "eval.tasks.all: the results of all tasks together"),
        (["eval.temprature=1"], "did you mean temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(make_tiny_run(tmp_path).config, overrides)


def test_settings_that_go_together_pass(tmp_path: Path) -> None:
    overrides = ["eval.num_generations=8", "eval.k=[1,4,8]", "eval.temperature=0.7", "eval.top_p=0.9", "eval.top_k=20"]
    config, _ = load_config(make_tiny_run(tmp_path).config, [*overrides, "eval.max_new_tokens=9"])
    assert (config.eval.k, config.eval.max_new_tokens) == ([1, 4, 8], 9)


def test_how_a_run_is_evaluated_is_no_part_of_its_identity(tmp_path: Path) -> None:
    path = make_tiny_run(tmp_path).config
    task = "eval.tasks.sums={dataset: {kind: few_shot_addition}}"
    other, _ = load_config(path, ["eval.max_samples=3", "eval.correct_reward=0.5", task])
    assert semantic_fingerprint(other) == semantic_fingerprint(load_config(path, [])[0])
