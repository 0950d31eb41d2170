"""Every estimator and every setting of the reward pipeline, through a step of a whole run with the tiny model."""

import math
from pathlib import Path

import pytest

from rl.core.metric_registry import check_metric_names
from tests.support.tiny_run import make_tiny_run

ONE_STEP = ["grpo.max_num_steps=1", "grpo.val_period=0", "checkpointing.enabled=false"]
SHAPED = "grpo.reward_shaping"
REWARDS = "tests.support.tiny_rewards"
KL = "loss_fn.reference_policy_kl_penalty=0.1"
CASES: dict[str, list[str]] = {
    "rloo": ["grpo.adv_estimator={name: rloo}", "grpo.use_leave_one_out_baseline=true"],
    "dr_grpo": ["grpo.adv_estimator={name: dr_grpo}"],
    "reinforce_plus_plus": [
        "grpo.adv_estimator={name: reinforce_plus_plus}",
        KL,
        "loss_fn.use_kl_in_reward=true",
    ],
    "raw_reward": ["grpo.adv_estimator={name: raw_reward, whiten: true}"],
    "gdpo": [
        "grpo.adv_estimator={name: gdpo, reward_weights: {letters: 2.0}}",
        f"env.reward={{_override_: true, kind: function, targets: {{letters: {REWARDS}:share_of_letters, "
        f"even: {REWARDS}:returns_none}}}}",
    ],
    "overlong": [
        f"{SHAPED}.enabled=true",
        f"{SHAPED}.max_response_length=6",
        f"{SHAPED}.overlong_buffer_length=5",
        f"{SHAPED}.overlong_buffer_penalty=0.5",
    ],
    "scaling_and_stop_properly": [
        "grpo.reward_scaling.enabled=true",
        "grpo.reward_scaling.target_min=-1",
        f"{SHAPED}.enabled=true",
        f"{SHAPED}.stop_properly_penalty_coef=0.5",
    ],
    "filters_and_clip": [
        "grpo.seq_logprob_error_threshold=2",
        "grpo.overlong_filtering=true",
        "grpo.advantage_clip_low=-1",
        "grpo.advantage_clip_high=1",
    ],
    "think_tags": [
        "reward_penalties.think_open_id=97",
        "reward_penalties.think_close_id=98",
        "reward_penalties.malformed_think_tag=true",
        "grpo.malformed_thinking_advantage=-2",
        "reward_penalties.unwanted_token_ids=[99]",
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_one_step(tmp_path: Path, name: str) -> None:
    run = make_tiny_run(tmp_path)
    run.run([*ONE_STEP, *CASES[name]])
    line = run.metrics()[-1]
    assert line["step"] == 1
    assert all(math.isfinite(value) for value in line.values())
    check_metric_names(metric for metric in line if "/" in metric)
    told = {
        "gdpo": {"train/reward/letters", "train/reward/even"},
        "overlong": {"train/raw_reward", "train/reward_penalties/overlong"},
        "scaling_and_stop_properly": {"train/raw_reward", "train/reward_penalties/stop_properly"},
        "filters_and_clip": {"train/num_overlong_filtered", "train/num_masked_seqs_by_logprob_error"},
        "think_tags": {"train/reward_penalties/malformed_think_tag", "train/reward_penalties/unwanted_token"},
    }
    assert told.get(name, set()) <= line.keys()
