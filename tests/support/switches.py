"""The settings of training that are true or false, and configurations in which every pair of their values occurs."""

from typing import Any

from rl.controller.checks import find_conflicts
from rl.controller.config import MasterConfig
from rl.core.config_schema import leaf_fields, sections
from tests.support.knob_probes import THINK_CLOSE, THINK_OPEN
from tests.support.pairs import Assignment, Pair, cover_pairs

TRAINING_SECTIONS = ("grpo.", "reward_penalties.", "loss_fn.", "policy.")
# Of the generator, and of when a run validates: no part of a step.
NO_SWITCHES = ("grpo.val_", "policy.generation", "policy.trust_remote_code")


def switches() -> list[str]:
    """Dotted keys of the settings of training that are true or false, whatever the estimator."""
    return [
        f"{place.key}.{name}"
        for place in sections(MasterConfig)
        if f"{place.key}.".startswith(TRAINING_SECTIONS) and not place.variant
        for name, info in leaf_fields(place.cls)
        if info.annotation is bool and not f"{place.key}.{name}".startswith(NO_SWITCHES)
    ]


COMMON = ("loss_fn.reference_policy_kl_penalty=0.1", "env.reward.think_tags=true")
# Some switches exclude each other wherever a third one has its default, so the cover is made over several bases.
BASES: dict[str, tuple[str, ...]] = {
    "one update": COMMON,
    "several updates": (*COMMON, "policy.train_global_batch_size=4"),
    "sequences": (*COMMON, "policy.train_global_batch_size=4", "loss_fn.token_level_loss=false"),
    "reward per token": (*COMMON, "policy.train_global_batch_size=4", "grpo.adv_estimator={name: reinforce_plus_plus}"),
    "corrected": (*COMMON, "loss_fn.use_importance_sampling_correction=true"),
}
# What a switch needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "grpo.reward_shaping.enabled": {"grpo.reward_shaping.stop_properly_penalty_coef": 0.5},
    "reward_penalties.malformed_think_tag": {
        "reward_penalties.think_open_id": THINK_OPEN,
        "reward_penalties.think_close_id": THINK_CLOSE,
    },
}


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        values = values[part]
    values[name] = value


def built(base: MasterConfig, assignment: Assignment) -> MasterConfig:
    values = base.model_dump()
    for key, value in assignment.items():
        _set(values, key, value)
        for name, other in BESIDE.get(key, {}).items() if value else ():
            _set(values, name, other)
    return MasterConfig.model_validate(values)


def value_at(config: MasterConfig, key: str) -> bool:
    value: Any = config
    for part in key.split("."):
        value = dict(value)[part]
    return bool(value)


def covering(base: MasterConfig) -> tuple[list[MasterConfig], list[Pair]]:
    """Accepted configurations, and the pairs that are refused where every other switch is as in `base`."""
    names = switches()
    defaults = {name: value_at(base, name) for name in names}
    assignments, refused = cover_pairs(names, defaults, lambda each: not list(find_conflicts(built(base, each))))
    return [built(base, assignment) for assignment in assignments], refused
