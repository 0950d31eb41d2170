"""A printed configuration loads to the same configuration."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.controller.config import MasterConfig
from rl.core.config_file import build, load
from rl.core.config_paths import find_config
from rl.core.config_tree import Leaf
from rl.core.config_view import scalar, to_yaml
from rl.core.yaml_reader import read_yaml


def test_the_resolved_configuration_loads_to_the_same(tmp_path: Path) -> None:
    odd = ["extras.a='1e-8'", "extras.b='yes'", "policy.tokenizer.chat_template='{{ x }} \\${y}: # é'", "extras.c=1e-8"]
    tree = load(find_config("grpo_smollm2_cpu"), odd, MasterConfig)
    config = build(tree, MasterConfig, allow_unknown=False)
    (tmp_path / "config.yaml").write_text(to_yaml(config, tree))
    again = build(load(tmp_path / "config.yaml", []), MasterConfig, allow_unknown=False)
    assert again == config
    assert again.policy.tokenizer.chat_template == "{{ x }} ${y}: # é"


def test_every_line_tells_its_source() -> None:
    tree = load(find_config("grpo_smollm2_cpu"), ["grpo.seed=3"], MasterConfig)
    lines = to_yaml(build(tree, MasterConfig, allow_unknown=False), tree).splitlines()
    assert any(line.startswith("  seed: 3") and line.endswith("# command line") for line in lines)
    assert any(line.startswith("  val_period: 10") and line.endswith("# class default") for line in lines)
    assert any(line.startswith("  num_prompts_per_step: 8") and ".yaml:" in line for line in lines)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["C"])),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(values)
def test_any_value_reads_back(value: object) -> None:
    node = read_yaml("a: " + scalar(value), "x").children["a"]  # type: ignore[union-attr]
    assert isinstance(node, Leaf)
    assert node.value == (value.replace("${", "\\${") if isinstance(value, str) else value) or "${" in str(value)


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1.0e-05"), ("a b", '"a b"'), ("off", '"off"'), ({}, "{}"), ([], "[]")]
)
def test_values_are_plain_yaml(value: object, text: str) -> None:
    assert scalar(value) == text
