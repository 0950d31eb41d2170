"""Reward, estimator and override settings that cannot go together, or have no effect, are refused."""

import pytest

from rl.controller.checks import ALL_CHECKS, find_conflicts
from rl.controller.checks_rewards import REWARD_CHECKS
from rl.controller.config import MasterConfig
from rl.core.config_file import build, load
from rl.core.config_paths import find_config
from rl.core.errors import ConfigError

DEFAULT = find_config("grpo_smollm2_cpu")
SCALING = "grpo.reward_scaling.enabled=true"
SHAPING = "grpo.reward_shaping.enabled=true"
OVERLONG = [
    SHAPING,
    "grpo.reward_shaping.max_response_length=4",
    "grpo.reward_shaping.overlong_buffer_length=2",
    "grpo.reward_shaping.overlong_buffer_penalty=1",
]
STOP = [SHAPING, "grpo.reward_shaping.stop_properly_penalty_coef=0.5"]
# The default run changes the baseline of its estimator; others have their own.
OWN_BASELINE = "grpo.use_leave_one_out_baseline=true"
GDPO = "grpo.adv_estimator={name: gdpo}"
COMPONENTS = ["data.env_name=multi", "env.multi={kind: math_multi_reward}"]
TOOLS = ["data.env_name=tools", "env.tools={kind: tools, tools: {calculator: {kind: calculator}}}"]
THINK_IDS = ["reward_penalties.think_open_id=5", "reward_penalties.think_close_id=6"]

# The check, the overrides that make it speak, and a piece of the message.
CONFLICTS = [
    (
        "siblings_make_the_baseline",
        ["grpo.num_generations_per_prompt=1"],
        "num_generations_per_prompt=1 leaves no siblings for the baseline of grpo.adv_estimator.name=grpo",
    ),
    (
        "siblings_make_the_baseline",
        ["grpo.num_generations_per_prompt=1", "grpo.adv_estimator={name: reinforce_plus_plus}", OWN_BASELINE],
        "the baseline of grpo.adv_estimator.name=reinforce_plus_plus",
    ),
    (
        "siblings_make_the_baseline",
        [
            "grpo.num_generations_per_prompt=1",
            "grpo.adv_estimator={name: raw_reward}",
            OWN_BASELINE,
            "grpo.use_dynamic_sampling=true",
        ],
        "one reward is never varied",
    ),
    (
        "baseline_settings_have_an_effect",
        ["grpo.adv_estimator={name: dr_grpo}", OWN_BASELINE, "grpo.normalize_rewards=false"],
        "normalize_rewards=false has no effect: grpo.adv_estimator.name=dr_grpo never divides",
    ),
    (
        "baseline_settings_have_an_effect",
        ["grpo.adv_estimator={name: rloo}"],
        "use_leave_one_out_baseline=false has no effect: grpo.adv_estimator.name=rloo is the leave-one-out baseline",
    ),
    *[
        (
            "baseline_settings_have_an_effect",
            [f"grpo.adv_estimator={{name: {name}}}"],
            f"use_leave_one_out_baseline=false has no effect: grpo.adv_estimator.name={name} {words}",
        )
        for name, words in {
            "dr_grpo": "is the mean of the whole group",
            "reinforce_plus_plus": "subtracts the mean of the whole group",
            "raw_reward": "has no baseline",
        }.items()
    ],
    ("scaling_has_ranges", ["grpo.reward_scaling.target_min=-1"], "target_min=-1.0 has no effect"),
    (
        "scaling_has_ranges",
        [SCALING, "grpo.reward_scaling.source_max=0"],
        "source_max=0.0 is not above grpo.reward_scaling.source_min=0.0",
    ),
    (
        "scaling_has_ranges",
        [SCALING, "grpo.reward_scaling.target_min=1"],
        "target_max=1.0 is not above grpo.reward_scaling.target_min=1.0",
    ),
    ("shaping_has_its_settings", OVERLONG[1:2], "max_response_length=4 has no effect: grpo.reward_shaping.enabled"),
    ("shaping_has_its_settings", STOP[1:], "stop_properly_penalty_coef=0.5 has no effect"),
    ("shaping_has_its_settings", [SHAPING], "got no max_response_length, overlong_buffer_length"),
    ("shaping_has_its_settings", OVERLONG[:3], "got no overlong_buffer_penalty"),
    (
        "shaping_has_its_settings",
        [*STOP, *OVERLONG[1:]],
        "overlong_buffer_length=2 has no effect: grpo.reward_shaping.stop_properly_penalty_coef=0.5 penalises",
    ),
    (
        "shaping_lowers_rewards",
        [SHAPING, "grpo.reward_shaping.stop_properly_penalty_coef=1"],
        "stop_properly_penalty_coef=1.0 leaves every reward as it is",
    ),
    ("shaping_lowers_rewards", [*OVERLONG[:3], "grpo.reward_shaping.overlong_buffer_penalty=0"], "leaves every reward"),
    (
        "shaping_lowers_rewards",
        [*OVERLONG, "grpo.reward_shaping.overlong_buffer_length=5"],
        "overlong_buffer_length=5 is longer than grpo.reward_shaping.max_response_length=4",
    ),
    (
        "shaping_lowers_rewards",
        [*OVERLONG, "grpo.reward_shaping.max_response_length=5"],
        "max_response_length=5 is more than a response can have: 4 generated tokens",
    ),
    ("components_are_scored_alone", [GDPO, *COMPONENTS, *STOP], "grpo.adv_estimator.name=gdpo looks at the components"),
    (
        "components_are_scored_alone",
        [GDPO, *COMPONENTS, "reward_penalties.unwanted_token_ids=[5]"],
        "reward_penalties.unwanted_token_ids=[5] has no effect",
    ),
    ("components_exist", [GDPO], "needs at least 2 reward components, but env.math of kind math has none"),
    (
        "components_exist",
        [
            GDPO,
            "data.env_name=one",
            "env.one={kind: function, targets: {a: 'm:f'}}",
        ],
        "env.one of kind function has a",
    ),
    (
        "components_exist",
        ["grpo.adv_estimator={name: gdpo, reward_weights: {style: 1.0}}", *COMPONENTS],
        "names style, which env.multi does not report; use names among correctness, integer, format",
    ),
    (
        "components_exist",
        ["grpo.adv_estimator={name: gdpo, reward_weights: {correctness: 0, integer: 0, format: 0}}", *COMPONENTS],
        "are all 0",
    ),
    (
        "clip_leaves_advantages",
        ["grpo.advantage_clip_low=0", "grpo.advantage_clip_high=0"],
        "make every advantage 0",
    ),
    (
        "overrides_have_a_cause",
        ["grpo.invalid_tool_call_advantage=-5"],
        "invalid_tool_call_advantage=-5.0 has no effect: env.math.kind=math has no tools",
    ),
    (
        "overrides_have_a_cause",
        ["grpo.malformed_thinking_advantage=-5"],
        "nothing judges think tags; set env.math.think_tags=true",
    ),
    ("overrides_have_a_cause", ["reward_penalties.malformed_think_tag=true"], "malformed_think_tag=true has no effect"),
    ("think_ids_have_a_use", THINK_IDS, "think_open_id=5 has no effect"),
    ("think_ids_have_a_use", THINK_IDS[:1], "think_open_id=5 and reward_penalties.think_close_id=null are no pair"),
    (
        "think_ids_have_a_use",
        [THINK_IDS[0], "reward_penalties.think_close_id=5", "reward_penalties.malformed_think_tag=true"],
        "are no pair of tags",
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
    assert {each.__name__ for each in REWARD_CHECKS} == {name for name, _, _ in CONFLICTS}


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.num_generations_per_prompt=1", "grpo.adv_estimator={name: raw_reward}", OWN_BASELINE],
        [
            "grpo.num_generations_per_prompt=1",
            "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}",
            OWN_BASELINE,
        ],
        ["grpo.adv_estimator={name: rloo}", OWN_BASELINE],
        [SCALING, "grpo.reward_scaling.target_min=-1"],
        OVERLONG,
        STOP,
        [GDPO, *COMPONENTS],
        ["grpo.adv_estimator={name: gdpo, reward_weights: {format: 0.5}}", *COMPONENTS],
        [GDPO, "data.env_name=own", "env.own={kind: function, target: 'm:f'}"],
        ["grpo.advantage_clip_low=-2", "grpo.advantage_clip_high=0"],
        ["grpo.malformed_thinking_advantage=-2", "env.math.think_tags=true"],
        ["grpo.malformed_thinking_advantage=-2", *THINK_IDS],
        ["reward_penalties.malformed_think_tag=true", *THINK_IDS],
        ["grpo.invalid_tool_call_advantage=-2", "grpo.max_rollout_turns=3", *TOOLS],
    ],
)
def test_what_goes_together_is_accepted(overrides: list[str]) -> None:
    mine = {check.__name__ for check in REWARD_CHECKS}
    assert not {each.__name__ for each in ALL_CHECKS if list(each(_config(overrides)))} & mine


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("grpo.reward_shaping.overlong_buffer_length=0", "grpo.reward_shaping.overlong_buffer_length"),
        ("grpo.reward_shaping.stop_properly_penalty_coef=1.5", "grpo.reward_shaping.stop_properly_penalty_coef"),
        ("grpo.advantage_clip_low=1", "grpo.advantage_clip_low"),
        ("grpo.advantage_clip_high=-1", "grpo.advantage_clip_high"),
        ("grpo.adv_estimator={name: nope}", "grpo.adv_estimator"),
    ],
)
def test_a_value_out_of_its_range_is_an_error_that_names_the_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        _config([override])


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("grpo.adv_estimator={name: grpo, normalize_rewards: false}", "use grpo.normalize_rewards"),
        ("grpo.adv_estimator={name: gdpo, use_leave_one_out_baseline: false}", "use grpo.use_leave_one_out_baseline"),
    ],
)
def test_the_second_place_of_an_option_is_refused_with_the_first(override: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        _config([override])
