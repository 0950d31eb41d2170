"""Whatever a file says, loading it ends in a configuration or in a ConfigError, never in another exception."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.controller.config import MasterConfig
from rl.controller.load import load_config
from rl.core.config_file import build, load, unknown_keys
from rl.core.config_paths import find_config
from rl.core.config_schema import leaf_fields, sections
from rl.core.errors import ConfigError

KEYS = [f"{section.key}.{name}" for section in sections(MasterConfig) for name, _ in leaf_fields(section.cls)]
KEYS += sorted({section.key for section in sections(MasterConfig)})
names = st.sampled_from([key.replace("<name>", "math") for key in KEYS])
unknown = st.sampled_from(
    ["grpo.x", "policy.generation.vllm", "data.train.jsonl", "env.other", "env.math.math", "zzz", "0"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 70)
    | st.floats()
    | st.sampled_from(["???", "jsonl", "hf", "tis", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "0", "x"]), inner, max_size=2),
    max_leaves=4,
)
overrides = st.lists(st.tuples(names | unknown, values), min_size=1, max_size=4)


def _text(value: Any) -> str:
    return json.dumps(value).replace("NaN", ".nan").replace("-Infinity", "-.inf").replace("Infinity", ".inf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(overrides)
def test_any_overrides_give_a_configuration_or_a_config_error(pairs: list[tuple[str, Any]]) -> None:
    arguments = [f"++{key}={_text(value)}" for key, value in pairs]
    try:
        load_config(find_config("grpo_smollm2_cpu"), arguments)
    except ConfigError as error:
        assert str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(overrides)
def test_allowing_unknown_keys_never_ends_in_an_unknown_key(pairs: list[tuple[str, Any]]) -> None:
    arguments = [f"++{key}={_text(value)}" for key, value in pairs]
    tree = load(find_config("grpo_smollm2_cpu"), arguments, MasterConfig)
    try:
        unknown_keys(tree, build(tree, MasterConfig, allow_unknown=True))
    except ConfigError as error:
        assert "unknown key" not in str(error)


@pytest.mark.parametrize(
    "text", ["a", "[", "{}", "a: b: c", "\t", "- a", "'", "&a *a", "? a", "%x", "a: *b", "\x00", "---\n---\n"]
)
def test_any_text_is_a_file_or_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "x.yaml", [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=3", r"data.train=3: must be a section$"),
        (
            "policy.optimizer.kwargs.betas=[0.9]",
            r"policy.optimizer.kwargs.betas=\[0.9\]: must be \[float >= 0 and < 1, float >= 0 and < 1\] \(Moment",
        ),
        ("grpo.seed=4294967296", r"grpo.seed=4294967296: must be int >= 0 and <= 4294967295"),
    ],
)
def test_what_is_allowed_is_said_once(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(find_config("grpo_smollm2_cpu"), [override])
