"""Settings of the buffer and of dynamic sampling that cannot go together, or have no effect, are refused."""

import pytest

from rl.controller.checks import ALL_CHECKS, find_conflicts
from rl.controller.checks_rollout import ROLLOUT_CHECKS
from rl.controller.config import MasterConfig
from rl.core.config_file import build, load
from rl.core.config_paths import find_config

DEFAULT = find_config("grpo_smollm2_cpu")
CORRECTION = "loss_fn.use_importance_sampling_correction=true"
DYNAMIC = "grpo.use_dynamic_sampling=true"

# The check, the overrides that make it speak, and a piece of the message.
CONFLICTS = [
    (
        "buffer_holds_the_window",
        ["async_rl.max_buffered_rollouts=7"],
        "needs async_rl.max_buffered_rollouts >= 8 (grpo.num_prompts_per_step=8), got 7",
    ),
    (
        "buffer_holds_the_window",
        ["async_rl.sampler.max_lookahead_versions=8", CORRECTION],
        "needs async_rl.max_buffered_rollouts >= 72",
    ),
    (
        "buffer_holds_the_window",
        [DYNAMIC, "grpo.batch_multiplier=1.5", "async_rl.max_buffered_rollouts=11", CORRECTION],
        "max_buffered_rollouts >= 12 (grpo.num_prompts_per_step=8, grpo.batch_multiplier=1.5), got 11",
    ),
    (
        "buffer_holds_the_window",
        [DYNAMIC, "grpo.batch_multiplier=2", "async_rl.sampler.max_lookahead_versions=7", CORRECTION],
        "max_lookahead_versions=7 needs async_rl.max_buffered_rollouts >= 72",
    ),
    ("dynamic_sampling_settings_have_an_effect", ["grpo.batch_multiplier=2"], "batch_multiplier=2.0 has no effect"),
    (
        "dynamic_sampling_settings_have_an_effect",
        ["grpo.dynamic_sampling_max_gen_batches=3"],
        "dynamic_sampling_max_gen_batches=3 has no effect: grpo.use_dynamic_sampling=false",
    ),
    (
        "multiplier_starts_more_groups",
        [DYNAMIC, "grpo.batch_multiplier=1.05", CORRECTION],
        "1.05 x grpo.num_prompts_per_step=8 rounds to 8; set grpo.batch_multiplier=1.125",
    ),
    (
        "surplus_needs_correction",
        [DYNAMIC, "grpo.batch_multiplier=2.5", "async_rl.max_buffered_rollouts=20"],
        "may be 2 versions old, which needs loss_fn.use_importance_sampling_correction=true, got false",
    ),
]


def _config(overrides: list[str]) -> MasterConfig:
    return build(load(DEFAULT, overrides, MasterConfig), MasterConfig, allow_unknown=False)


@pytest.mark.parametrize(("check", "overrides", "message"), CONFLICTS)
def test_a_conflict_is_refused_by_its_check_alone(check: str, overrides: list[str], message: str) -> None:
    config = _config(overrides)
    assert {each.__name__ for each in ALL_CHECKS if list(each(config))} == {check}
    assert message in "\n".join(f"{conflict.problem}; {conflict.fix}" for conflict in find_conflicts(config))


def test_every_check_has_a_conflict_above() -> None:
    assert {each.__name__ for each in ROLLOUT_CHECKS} == {name for name, _, _ in CONFLICTS}


@pytest.mark.parametrize(
    "overrides",
    [
        [DYNAMIC],
        [DYNAMIC, "grpo.dynamic_sampling_max_gen_batches=1"],
        [DYNAMIC, "grpo.batch_multiplier=1.5", CORRECTION],
        [DYNAMIC, "grpo.batch_multiplier=2", CORRECTION, "async_rl.sampler.max_lookahead_versions=6"],
    ],
)
def test_what_goes_together_is_accepted(overrides: list[str]) -> None:
    assert list(find_conflicts(_config(overrides))) == []
