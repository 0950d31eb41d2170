"""Cross-section checks of rewards, estimators, overrides and the sibling count. See `rl.controller.checks`."""

from collections.abc import Iterator

from rl.algorithms.config import GDPOConfig, RawRewardConfig, ReinforcePlusPlusConfig
from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert, is_changed
from rl.core.config_view import scalar
from rl.environments.config import EnvironmentConfig, FunctionEnvConfig, ThinkingConfig, ToolsEnvConfig

_ESTIMATOR = "grpo.adv_estimator.name"
_GENERATIONS = "grpo.num_generations_per_prompt"
_SCALING = "grpo.reward_scaling"
_SHAPING = "grpo.reward_shaping"
_PENALTIES = "reward_penalties"
_COEFFICIENT = "stop_properly_penalty_coef"
_OVERLONG = ["max_response_length", "overlong_buffer_length", "overlong_buffer_penalty"]
_IDS = ["think_open_id", "think_close_id"]
# The baselines that the estimators' papers define.
_BASELINES = {
    "rloo": "is the leave-one-out baseline; dr_grpo is the mean of the whole group",
    "dr_grpo": "is the mean of the whole group; rloo is the leave-one-out baseline",
    "reinforce_plus_plus": "subtracts the mean of the whole group, or nothing",
    "raw_reward": "has no baseline",
}


def siblings_make_the_baseline(config: MasterConfig) -> Iterator[Conflict]:
    """A group of one has no baseline among its siblings, and no varied rewards."""
    grpo, generations = config.grpo, config.grpo.num_generations_per_prompt
    if generations > 1:
        return
    estimator = grpo.adv_estimator
    alone = isinstance(estimator, RawRewardConfig) or (
        isinstance(estimator, ReinforcePlusPlusConfig) and not estimator.minus_baseline
    )
    if not alone:
        problem = f"{_GENERATIONS}={generations} leaves no siblings for the baseline of {_ESTIMATOR}={estimator.name}"
        yield Conflict((_GENERATIONS, _ESTIMATOR), problem, "use at least 2")
    if grpo.use_dynamic_sampling:
        key = "grpo.use_dynamic_sampling"
        problem = f"{key}=true replaces every group of {_GENERATIONS}={generations}: one reward is never varied"
        yield Conflict((key, _GENERATIONS), problem, f"set {key}=false, or use at least 2 generations")


def baseline_settings_have_an_effect(config: MasterConfig) -> Iterator[Conflict]:
    """Only estimators by group divide by the group's deviation and choose their baseline; the others are defined."""
    name = config.grpo.adv_estimator.name
    if name in _BASELINES:
        reason = f"{_ESTIMATOR}={name} never divides by the group's standard deviation"
        yield from inert(config.grpo, "grpo", ["normalize_rewards"], _ESTIMATOR, reason)
        reason = f"{_ESTIMATOR}={name} {_BASELINES[name]}"
        yield from inert(config.grpo, "grpo", ["use_leave_one_out_baseline"], _ESTIMATOR, reason)


def scaling_has_ranges(config: MasterConfig) -> Iterator[Conflict]:
    """A range has a width, or rewards would be divided by 0 or all become equal."""
    scaling = config.grpo.reward_scaling
    if not scaling.enabled:
        names = ["source_min", "source_max", "target_min", "target_max"]
        yield from inert(scaling, _SCALING, names, f"{_SCALING}.enabled", f"{_SCALING}.enabled=false")
        return
    ranges = {"source": (scaling.source_min, scaling.source_max), "target": (scaling.target_min, scaling.target_max)}
    for name, (low, high) in ranges.items():
        if high <= low:
            keys = (f"{_SCALING}.{name}_max", f"{_SCALING}.{name}_min")
            yield Conflict(keys, f"{keys[0]}={high} is not above {keys[1]}={low}", f"raise {keys[0]}")


def shaping_has_its_settings(config: MasterConfig) -> Iterator[Conflict]:
    """Either the three of the overlong penalty, or the coefficient."""
    shaping = config.grpo.reward_shaping
    if not shaping.enabled:
        reason = f"{_SHAPING}.enabled=false; set it to true"
        yield from inert(shaping, _SHAPING, [*_OVERLONG, _COEFFICIENT], f"{_SHAPING}.enabled", reason)
        return
    given = [name for name in _OVERLONG if is_changed(shaping, name)]
    missing = [name for name in _OVERLONG if name not in given]
    if shaping.stop_properly_penalty_coef is not None:
        key = f"{_SHAPING}.{_COEFFICIENT}"
        reason = f"{key}={shaping.stop_properly_penalty_coef} penalises truncated responses instead"
        yield from inert(shaping, _SHAPING, given, key, reason)
    elif missing:
        keys = tuple(f"{_SHAPING}.{name}" for name in [*missing, "enabled"])
        problem = f"{_SHAPING}.enabled=true needs {', '.join(_OVERLONG)}, got no {', '.join(missing)}"
        yield Conflict(keys, problem, f"set them, or {_SHAPING}.{_COEFFICIENT}")


def shaping_lowers_rewards(config: MasterConfig) -> Iterator[Conflict]:
    """A factor of 1, a penalty of 0, or one that no response is long enough for, change nothing."""
    shaping = config.grpo.reward_shaping
    if not shaping.enabled:
        return
    if shaping.stop_properly_penalty_coef == 1:
        key = f"{_SHAPING}.{_COEFFICIENT}"
        yield Conflict((key,), f"{key}=1.0 leaves every reward as it is", "use less than 1")
    if shaping.overlong_buffer_penalty == 0:
        key = f"{_SHAPING}.overlong_buffer_penalty"
        yield Conflict((key,), f"{key}=0.0 leaves every reward as it is", "use more than 0")
    length, buffer = shaping.max_response_length, shaping.overlong_buffer_length
    key, longest = f"{_SHAPING}.max_response_length", _longest_response(config)
    if length is not None and buffer is not None and buffer > length:
        keys = (f"{_SHAPING}.overlong_buffer_length", key)
        yield Conflict(keys, f"{keys[0]}={buffer} is longer than {key}={length}", f"use at most {length}")
    if length is not None and length > longest:
        bounds = ("policy.generation.max_new_tokens", "grpo.max_rollout_turns", "policy.max_total_sequence_length")
        problem = f"{key}={length} is more than a response can have: {longest} generated tokens"
        yield Conflict((key, *bounds), problem, f"use at most {longest}")


def _longest_response(config: MasterConfig) -> int:
    """Most tokens that a rollout can generate; at least one token of the context is the prompt's."""
    generated = config.policy.generation.max_new_tokens * config.grpo.max_rollout_turns
    return min(generated, config.policy.max_total_sequence_length - 1)


def components_are_scored_alone(config: MasterConfig) -> Iterator[Conflict]:
    """GDPO looks at the components, so what changes their sum alone has no effect."""
    if not isinstance(config.grpo.adv_estimator, GDPOConfig):
        return
    reason = f"{_ESTIMATOR}=gdpo looks at the components, not at the reward"
    yield from inert(config.grpo.reward_shaping, _SHAPING, ["enabled"], _ESTIMATOR, reason)
    names = ["unwanted_token_ids", "malformed_think_tag"]
    yield from inert(config.reward_penalties, _PENALTIES, names, _ESTIMATOR, reason)


def components_exist(config: MasterConfig) -> Iterator[Conflict]:
    """GDPO needs two components, and weights name some of them. A function may name its own when it is called."""
    estimator, env_name = config.grpo.adv_estimator, config.data.env_name
    env = config.env.get(env_name)
    if not isinstance(estimator, GDPOConfig) or env is None:
        return
    names, weights_key, env_key = env.component_names, "grpo.adv_estimator.reward_weights", f"env.{env_name}"
    if len(names) < 2 and (names or not _may_name_components(env)):
        problem = f"{_ESTIMATOR}=gdpo needs at least 2 reward components, but {env_key} of kind {env.kind} has "
        problem += ", ".join(names) or "none"
        fix = f"use kind math_multi_reward, or function with targets, in {env_key}; or another {_ESTIMATOR}"
        yield Conflict((_ESTIMATOR, f"{env_key}.kind"), problem, fix)
    unknown = sorted(set(estimator.reward_weights) - set(names))
    if len(names) >= 2 and unknown:
        problem = f"{weights_key} names {', '.join(unknown)}, which {env_key} does not report"
        yield Conflict((weights_key, f"{env_key}.kind"), problem, f"use names among {', '.join(names)}")
    weights = [estimator.reward_weights.get(name, 1.0) for name in names]
    if weights and not any(weights):
        yield Conflict((weights_key,), f"{weights_key} are all 0: nothing would be learned", "raise one of them")


def _may_name_components(env: EnvironmentConfig) -> bool:
    """Whether the rewards decide, when they come, which components there are."""
    scorer = env.scorer if isinstance(env, ToolsEnvConfig) else env
    return isinstance(scorer, FunctionEnvConfig)


def clip_leaves_advantages(config: MasterConfig) -> Iterator[Conflict]:
    """Bounds that meet at 0 leave nothing."""
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low == 0 and high == 0:
        keys = ("grpo.advantage_clip_low", "grpo.advantage_clip_high")
        yield Conflict(
            keys, f"{keys[0]}=0 and {keys[1]}=0 make every advantage 0", f"lower {keys[0]} or raise {keys[1]}"
        )


def overrides_have_a_cause(config: MasterConfig) -> Iterator[Conflict]:
    """Somebody must flag the turns whose advantage is overridden."""
    env = config.env.get(config.data.env_name)
    kind = f"env.{config.data.env_name}.kind"
    if env is not None and not isinstance(env, ToolsEnvConfig):
        reason = f"{kind}={env.kind} has no tools"
        yield from inert(config.grpo, "grpo", ["invalid_tool_call_advantage"], kind, reason)
    if not _thinking_is_judged(config):
        cause = f"env.{config.data.env_name}.think_tags"
        reason = f"nothing judges think tags; set {cause}=true, or {_PENALTIES}.think_open_id and .think_close_id"
        yield from inert(config.grpo, "grpo", ["malformed_thinking_advantage"], cause, reason)
        yield from inert(config.reward_penalties, _PENALTIES, ["malformed_think_tag"], cause, reason)


def think_ids_have_a_use(config: MasterConfig) -> Iterator[Conflict]:
    """Both tags have an id of their own, and somebody asks whether they match."""
    penalties = config.reward_penalties
    opening, closing = penalties.think_open_id, penalties.think_close_id
    keys = tuple(f"{_PENALTIES}.{name}" for name in _IDS)
    if (opening is None) != (closing is None) or (opening is not None and opening == closing):
        problem = f"{keys[0]}={scalar(opening)} and {keys[1]}={scalar(closing)} are no pair of tags"
        yield Conflict(keys, problem, "set both, to different token ids, or neither")
        return
    if not penalties.malformed_think_tag and config.grpo.malformed_thinking_advantage is None:
        key = f"{_PENALTIES}.malformed_think_tag"
        reason = f"{key}=false and grpo.malformed_thinking_advantage=null do nothing about the tags"
        yield from inert(penalties, _PENALTIES, _IDS, key, reason)


def _thinking_is_judged(config: MasterConfig) -> bool:
    """Whether the environment or the token ids can flag malformed thinking."""
    penalties, env = config.reward_penalties, config.env.get(config.data.env_name)
    scorer = env.scorer if isinstance(env, ToolsEnvConfig) else env
    by_environment = isinstance(scorer, ThinkingConfig) and scorer.think_tags
    return by_environment or (penalties.think_open_id is not None and penalties.think_close_id is not None)


REWARD_CHECKS: list[Check] = [
    siblings_make_the_baseline,
    baseline_settings_have_an_effect,
    scaling_has_ranges,
    shaping_has_its_settings,
    shaping_lowers_rewards,
    components_are_scored_alone,
    components_exist,
    clip_leaves_advantages,
    overrides_have_a_cause,
    think_ids_have_a_use,
]
