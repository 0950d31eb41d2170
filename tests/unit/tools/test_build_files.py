"""BUILD files are written from the imports of a small tree."""

from pathlib import Path

import pytest

from tools.build_files import Generator

TREE = {
    "rl/__init__.py": "",
    "rl/core/__init__.py": "",
    "rl/core/types.py": "",
    "rl/trainer/__init__.py": "",
    "rl/trainer/config.py": 'TARGET = "rl.trainer.worker:PolicyWorker"\n',
    "rl/trainer/worker.py": "import torch\nfrom rl.core.types import Prompt\nfrom rl.trainer import config\n",
    "rl/train_grpo.py": "from rl.trainer.config import TARGET\n",
    "tests/unit/trainer/test_config.py": "from rl.trainer.config import TARGET\n",
    "tests/unit/conftest.py": "",
    "tools/build_extras.toml": '[[rule]]\nmatch = ["tests/unit/*test_*.py"]\nsize = "small"\ndata = ["//configs"]\n',
}


def build_file(root: Path, folder: str, files: dict[str, str] = TREE) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Generator(root).files()[root / folder / "BUILD.bazel"]


def rule(text: str, name: str) -> str:
    return next(part for part in text.split("\n\n") if f'name = "{name}"' in part)


def test_a_module_depends_on_what_it_imports_and_on_its_package(tmp_path: Path) -> None:
    worker = rule(build_file(tmp_path, "rl/trainer"), "worker")
    assert '":config",' in worker
    assert '":__init__",' in worker
    assert '"//rl/core:types",' in worker
    assert "torch" not in worker


def test_a_string_is_no_dependency_of_the_library_that_holds_it(tmp_path: Path) -> None:
    assert "worker" not in rule(build_file(tmp_path, "rl/trainer"), "config")


def test_a_test_takes_up_what_is_named_in_strings_and_the_conftest_above_it(tmp_path: Path) -> None:
    text = rule(build_file(tmp_path, "tests/unit/trainer"), "trainer")
    assert '"//rl/trainer:worker",' in text
    assert '"//tests/unit:conftest",' in text
    assert 'size = "small"' in text
    assert 'data = ["//configs"]' in text


def test_a_test_that_imports_another_one_is_refused(tmp_path: Path) -> None:
    files = {"tests/unit/trainer/test_worker.py": "from tests.unit.trainer.test_config import TARGET\n"}
    with pytest.raises(SystemExit, match="test_worker.py imports the test tests.unit.trainer.test_config"):
        build_file(tmp_path, "tests/unit/trainer", {**TREE, **files})


def test_the_unit_tests_of_a_folder_are_one_target_and_heavier_ones_are_a_target_each(tmp_path: Path) -> None:
    names = ["test_a.py", "test_b.py"]
    files = {
        f"tests/{tier}/trainer/{name}": "from rl.core import types\n" for tier in ["unit", "engine"] for name in names
    }
    files["tests/unit/trainer/helper.py"] = ""
    unit = build_file(tmp_path, "tests/unit/trainer", {**TREE, **files})
    assert unit.count("rl_pytest(\n") == 1
    assert all(f'"{name}",' in rule(unit, "trainer") for name in [*names, "test_config.py"])
    assert '"//rl/core:types",' in rule(unit, "trainer")
    assert 'srcs = ["helper.py"]' in rule(unit, "helper")
    engine = build_file(tmp_path, "tests/engine/trainer", {**TREE, **files})
    assert ['srcs = ["test_a.py"]' in rule(engine, "test_a"), 'srcs = ["test_b.py"]' in rule(engine, "test_b")] == [
        True,
        True,
    ]


def test_an_entry_point_gets_every_module(tmp_path: Path) -> None:
    text = build_file(tmp_path, "rl")
    assert 'deps = [":modules"]' in rule(text, "train_grpo")
    assert '"//rl/trainer:worker",' in rule(text, "modules")


def test_lines_below_the_marker_are_kept(tmp_path: Path) -> None:
    by_hand = '# Written by hand:\n\nfilegroup(name = "mine")\n'
    text = build_file(tmp_path, "rl/core", {**TREE, "rl/core/BUILD.bazel": f"old\n\n{by_hand}"})
    assert text.endswith(f")\n\n{by_hand}")
    assert "old" not in text


def test_the_rollout_layer_sees_only_protocol_modules(tmp_path: Path) -> None:
    files = {"rl/generation/__init__.py": "", "rl/generation/generator.py": "", "rl/generation/hf.py": ""}
    text = build_file(tmp_path, "rl/generation", {**TREE, **files})
    assert '"//:l3"' in rule(text, "generator")
    assert "visibility" not in rule(text, "hf")
