"""Every value of every option, and every pair of switches, makes a whole optimizer step or is refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest

from rl.controller.checks import find_conflicts
from rl.controller.config import MasterConfig
from rl.core.config_schema import leaf_fields, sections
from tests.support.knob_probes import THINK_CLOSE, THINK_OPEN
from tests.support.knob_rows import FLIPS
from tests.support.knob_workshop import Workshop
from tests.support.one_step import one_step
from tests.support.pairs import Assignment, cover_pairs

TRAINING_SECTIONS = ("grpo.", "reward_penalties.", "loss_fn.", "policy.")
# Of the generator, and of when a run validates: no part of a step.
NO_SWITCHES = ("grpo.val_", "policy.generation", "policy.trust_remote_code")


def _values() -> Iterator[tuple[str, ...]]:
    """The overrides of each value of each row about training."""
    for row in FLIPS:
        if row.key.startswith(TRAINING_SECTIONS) and not row.key.startswith(NO_SWITCHES):
            yield from row.overrides()


@pytest.mark.parametrize("overrides", dict.fromkeys(_values()), ids=lambda overrides: " ".join(overrides)[-90:])
async def test_every_value_makes_a_whole_step(workshop: Workshop, overrides: tuple[str, ...]) -> None:
    metrics = await one_step(workshop.load(overrides).config)
    assert metrics["train/num_rollouts"] > 0


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


def _built(base: MasterConfig, assignment: Assignment) -> MasterConfig:
    values = base.model_dump()
    for key, value in assignment.items():
        _set(values, key, value)
        for name, other in BESIDE.get(key, {}).items() if value else ():
            _set(values, name, other)
    return MasterConfig.model_validate(values)


def _at(config: MasterConfig, key: str) -> bool:
    value: Any = config
    for part in key.split("."):
        value = dict(value)[part]
    return bool(value)


async def test_pairs_of_switches_make_a_whole_step_or_are_refused_by_name(workshop: Workshop) -> None:
    names = switches()
    assert len(names) >= 18
    refused_everywhere: set[Any] | None = None
    steps = 0
    for overrides in BASES.values():
        base = workshop.load(overrides).config
        defaults = {name: _at(base, name) for name in names}
        assignments, refused = cover_pairs(
            names,
            defaults,
            lambda assignment, base=base: not list(find_conflicts(_built(base, assignment))),  # type: ignore[misc]
        )
        for pair in refused:
            conflicts = list(find_conflicts(_built(base, defaults | dict(pair))))
            named = {key for conflict in conflicts for key in conflict.keys}
            assert named & {name for name, _ in pair}, f"{pair} is refused without naming either: {conflicts}"
        refused_everywhere = set(refused) if refused_everywhere is None else refused_everywhere & set(refused)
        for assignment in assignments:
            await one_step(_built(base, assignment))
            steps += 1
    pairs = 2 * len(names) * (len(names) - 1)
    assert refused_everywhere is not None
    assert len(refused_everywhere) <= 0.05 * pairs, sorted(refused_everywhere)
    assert steps >= 40
