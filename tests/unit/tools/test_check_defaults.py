"""Scattered and redundant defaults are found; the tree has none."""

from pathlib import Path

import pytest

from tools import check_defaults

ROOT = Path(check_defaults.__file__).resolve().parent.parent


def test_the_tree_has_no_scattered_defaults() -> None:
    assert list(check_defaults.find_scattered_defaults(ROOT)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from rl.core.config import ConfigModel\nclass A(ConfigModel):\n    x: int\n",
            "x.py:2: A declares configuration",
        ),
        ("def f(config: dict):\n    return config.get('val_period', 7)\n", 'x.py:2: .get("val_period", ...)'),
        ("def f(other: dict):\n    return other.get('val_period', 10)\n", 'x.py:2: .get("val_period", ...)'),
        ("def f(val_period: int = 10):\n    pass\n", "x.py:1: parameter val_period of f repeats"),
        ("def f(*, start_timeout_s: float = 600.0):\n    pass\n", "x.py:1: parameter start_timeout_s of f repeats"),
        ("def f(trust_remote_code: bool = False):\n    pass\n", "x.py:1: parameter trust_remote_code of f repeats"),
        ("def f(*, val_at_start=True):\n    pass\n", "x.py:1: parameter val_at_start of f repeats"),
        ("class A:\n    val_period: int = 10\n", "x.py:2: field val_period repeats"),
    ],
)
def test_a_scattered_default_is_found(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "x.py").write_text(text)
    found = list(check_defaults.find_scattered_defaults(tmp_path))
    assert len(found) == 1
    assert found[0].startswith(f"rl/{message}")


@pytest.mark.parametrize(
    "text",
    [
        "def f(other: dict):\n    return other.get('val_period', 11)\n",
        "def f(val_period: int):\n    return {}.get('something', 10)\n",
        "def f(is_new: bool = True, enabled: bool = False):\n    pass\n",
        "def f(name: str = 'constant', val_period: int = 12):\n    pass\n",
    ],
)
def test_other_defaults_are_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "x.py").write_text(text)
    assert list(check_defaults.find_scattered_defaults(tmp_path)) == []


def test_a_redundant_value_is_found(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("grpo: {seed: 1, val_period: 20}\nenv: {math: {kind: math}}\n")
    child = tmp_path / "child.yaml"
    child.write_text(
        "defaults: parent.yaml\n"
        "grpo:\n"
        "  seed: 1\n"
        "  val_period: 10\n"
        "  max_num_steps: 1000\n"
        "policy:\n"
        "  generation:\n"
        "    backend: hf\n"
        "    request_timeout_s: 300.0\n"
    )
    found = [line.partition("child.yaml")[2] for line in check_defaults.find_redundant_values(child)]
    assert [line.split(" is ")[0] for line in found] == [
        ":3: grpo.seed",
        ":5: grpo.max_num_steps",
        ":9: policy.generation.request_timeout_s",
    ]
