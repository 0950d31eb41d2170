"""The registry of metrics and what runs log are the same."""

from pathlib import Path

import pytest

from rl.core.metric_registry import MetricSpec, find_spec, metric_groups
from tests.support.tiny_run import make_tiny_run

KEYS = {"step", "time_s"}
# Registered for what the tiny run's settings switch on.
SWITCHED_ON = {
    "train/is_oob_ratio": ["loss_fn.use_importance_sampling_correction=true", *[
        f"loss_fn.truncated_importance_sampling_{key}" for key in ("type=tis", "ratio=2.0")
    ]],
    "train/max_seq_mult_prob_error_after_mask": ["grpo.seq_logprob_error_threshold=2.0"],
    "train/mean_seq_mult_prob_error": ["policy.train_global_batch_size=4"],
    "train/dynamic_sampling_num_gen_batches": ["grpo.use_dynamic_sampling=true"],
    "train/unfiltered_reward": ["grpo.use_dynamic_sampling=true"],
    "train/num_overlong_filtered": ["grpo.overlong_filtering=true"],
    "train/positive_nll_loss": ["loss_fn.positive_example_nll_weight=0.1"],
    "train/num_scaled_out_of_range": ["grpo.reward_scaling={enabled: true, target_max: 2.0}"],
    "train/raw_reward": ["grpo.reward_scaling={enabled: true, target_max: 2.0}"],
    "train/reward_penalties/stop_properly": [
        "grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.5}"
    ],
}  # fmt: skip


def run_specs() -> list[MetricSpec]:
    return [spec for _, specs in metric_groups() for spec in specs if not spec.name.startswith("eval/")]


def test_a_run_logs_every_metric_that_is_logged_always_and_no_other(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.run(["grpo.max_num_steps=2", "grpo.val_at_end=true"])
    lines = run.metrics()
    for prefix, line in (("train/", lines[0]), ("validation/", lines[-1])):
        always = {s.name for s in run_specs() if s.name.startswith(prefix) and not s.when and not s.is_family}
        assert always - line.keys() == set()
    for line in lines:
        for prefix in ("timing/train/", "performance/", "refit/"):
            always = {s.name for s in run_specs() if s.name.startswith(prefix) and not s.when}
            assert always - line.keys() == set()
        assert [name for name in line.keys() - KEYS if find_spec(name) is None] == []
    assert "timing/validation/total" in lines[-1]


@pytest.mark.parametrize("name", list(SWITCHED_ON))
def test_a_metric_of_a_setting_is_logged_where_the_setting_is_on(tmp_path: Path, name: str) -> None:
    run = make_tiny_run(tmp_path)
    run.run(["grpo.max_num_steps=1", "checkpointing.enabled=false", *SWITCHED_ON[name]])
    (line,) = run.metrics()
    assert name in line
    assert find_spec(name) is not None
