"""The classes can be looked into: keys, ranges, defaults, alternatives."""

import pytest

from rl.controller.config import MasterConfig
from rl.core.config_schema import (
    allowed,
    class_at,
    default_at,
    discriminator,
    field_at,
    is_operational,
    section_classes,
    sections,
)
from rl.data.config import JsonlDataset
from rl.environments.config import FunctionEnvConfig
from rl.generation.config import HfGenerationConfig, VllmGenerationConfig


def test_every_section_is_listed_once_per_class() -> None:
    listed = [(section.key, section.cls) for section in sections(MasterConfig)]
    assert ("policy.generation", HfGenerationConfig) in listed
    assert ("data.validation", JsonlDataset) in listed
    assert ("env.<name>", FunctionEnvConfig) in listed


@pytest.mark.parametrize(
    ("path", "values", "cls"),
    [
        (("policy", "generation"), {}, VllmGenerationConfig),
        (("policy", "generation"), {"policy": {"generation": {"backend": "hf"}}}, HfGenerationConfig),
        (("data", "train"), {"data": {"train": {"kind": "jsonl"}}}, JsonlDataset),
        (("data", "train"), {}, None),
        (("env", "mine"), {"env": {"mine": {"kind": "function"}}}, FunctionEnvConfig),
        (("grpo", "seed"), {}, None),
    ],
)
def test_values_choose_the_class_of_a_section(path: tuple[str, ...], values: object, cls: type | None) -> None:
    assert class_at(MasterConfig, path, values) is cls


def test_alternatives_are_told_apart_by_one_field() -> None:
    generation = section_classes(MasterConfig.model_fields["policy"].annotation)[0].model_fields["generation"]
    assert discriminator(section_classes(generation.annotation)) == "backend"


def test_defaults_are_found_by_key() -> None:
    assert default_at(MasterConfig, ("grpo", "val_period"), {}) == (True, 10)
    assert default_at(MasterConfig, ("policy", "model_name"), {}) == (False, None)
    assert default_at(MasterConfig, ("grpo", "nothing"), {}) == (False, None)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("grpo.seed", "int >= 0 and <= 4294967295"),
        ("grpo.val_top_k", "int >= 1 or null"),
        ("grpo.val_top_p", "float > 0 and <= 1"),
        ("policy.precision", "float32 or bfloat16"),
        ("policy.generation.stop_token_ids", "list of int or null"),
        ("policy.optimizer.kwargs.betas", "[float >= 0 and < 1, float >= 0 and < 1]"),
        ("extras", "a mapping"),
    ],
)
def test_what_is_allowed_is_told_in_words(path: str, text: str) -> None:
    info = field_at(MasterConfig, tuple(path.split(".")), {})
    assert info is not None
    assert allowed(info) == text


def test_operational_fields_are_marked() -> None:
    steps = field_at(MasterConfig, ("grpo", "max_num_steps"), {})
    seed = field_at(MasterConfig, ("grpo", "seed"), {})
    assert steps is not None and is_operational(steps)
    assert seed is not None and not is_operational(seed)
