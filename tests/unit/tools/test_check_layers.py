"""The layer check finds each kind of violation in a small tree of its own."""

from pathlib import Path

import pytest

from tools.check_layers import find_violations


def violations_of(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sorted(set(find_violations(root)))


def test_downward_imports_are_fine(tmp_path: Path) -> None:
    files = {"rl/core/types.py": "", "rl/ops/kl.py": "from rl.core.types import Prompt\nimport torch\n"}
    assert violations_of(tmp_path, files) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("rl/core/types.py", "rl.ops.kl"),
        ("rl/data/prompts.py", "rl.ops.kl"),
        ("rl/ops/masks.py", "rl.algorithms.grpo"),
        ("rl/trainer/worker.py", "rl.generation.hf"),
        ("rl/rollout/buffer.py", "rl.trainer.worker"),
        ("rl/rollout/buffer.py", "rl.generation.hf"),
        ("rl/controller/step.py", "rl.cli.app"),
        ("rl/controller/step.py", "rl.train_grpo"),
    ],
)
def test_upward_and_sideways_imports_are_violations(tmp_path: Path, importer: str, imported: str) -> None:
    target = imported.replace(".", "/") + ".py"
    found = violations_of(tmp_path, {target: "", importer: f"import {imported}\n"})
    assert len(found) == 1
    assert found[0].startswith(f"{importer}:1:")


def test_rollout_sees_the_protocol_modules(tmp_path: Path) -> None:
    files = {
        "rl/generation/generator.py": "",
        "rl/environments/base.py": "",
        "rl/rollout/runner.py": "from rl.environments import base\nfrom rl.generation.generator import Generator\n",
    }
    assert violations_of(tmp_path, files) == []


def test_own_code_is_not_imported_inside_functions(tmp_path: Path) -> None:
    files = {"rl/core/types.py": "", "rl/ops/kl.py": "def f():\n    from rl.core import types\n"}
    assert violations_of(tmp_path, files) == [
        "rl/ops/kl.py:2: import of rl.core.types inside a function; imports of our own code stand at the top"
    ]


def test_own_code_is_not_named_in_strings_but_by_those_who_may(tmp_path: Path) -> None:
    text = 'def f():\n    import_object("rl.data.hf_dataset:load_hf_rows")("rl.data.nothing", "rl.data: not a path")\n'
    files = {"rl/data/hf_dataset.py": "", "rl/data/prompts.py": text}
    remedy = "import it, or add it to NAMED_IN_STRINGS in tools/check_layers.py"
    assert violations_of(tmp_path, files) == [
        f"rl/data/prompts.py:1: rl.data.hf_dataset is named in a string; {remedy}"
    ]


def test_a_string_does_not_lead_upwards_even_where_one_is_allowed(tmp_path: Path) -> None:
    files = {"rl/cluster/rendezvous.py": "", "rl/cluster/host.py": 'STORE = "rl.cluster.rendezvous:serve_store"\n'}
    assert violations_of(tmp_path, files) == []
    upward = {
        "rl/controller/run.py": "",
        "rl/cluster/host.py": '_RUN = ["rl.cluster.rendezvous", "rl.controller.run"]\n',
    }
    found = violations_of(tmp_path, upward)
    assert len(found) == 2
    assert "in a string: cluster (layer 1) must not import rl.controller.run (layer 4)" in found[0]


def test_a_permission_that_nobody_uses_is_named(tmp_path: Path) -> None:
    found = violations_of(tmp_path, {"rl/cluster/host.py": ""})
    assert found == [
        "rl/cluster/host.py:1: rl/cluster/rendezvous.py is no longer named here; "
        "take it out of NAMED_IN_STRINGS in tools/check_layers.py"
    ]


def test_big_foreign_packages_have_one_home(tmp_path: Path) -> None:
    files = {
        "rl/cluster/ray.py": "import ray\n",
        "rl/controller/step.py": "import ray\n",
        "rl/trainer/worker.py": "def f():\n    from transformers import AutoModel\n",
    }
    found = violations_of(tmp_path, files)
    assert [line.split(":")[0] for line in found] == ["rl/controller/step.py", "rl/trainer/worker.py"]


def test_a_config_module_stays_free_of_torch_through_all_that_it_imports(tmp_path: Path) -> None:
    files = {
        "rl/ops/kl.py": "import torch\n",
        "rl/ops/masks.py": "import rl.ops.kl\n",
        "rl/ops/config.py": "import rl.ops.masks\n",
    }
    chain = "rl.ops.config -> rl.ops.masks -> rl.ops.kl -> torch"
    assert violations_of(tmp_path, files) == [f"rl/ops/config.py:1: must stay free of torch; imported through {chain}"]


def test_packages_without_a_layer_are_named(tmp_path: Path) -> None:
    assert "has no layer" in violations_of(tmp_path, {"rl/misc/x.py": ""})[0]
