"""The wheel that is shipped: it holds what it should, and works where nothing of the checkout can be imported.

Bazel builds it for this test. Without Bazel the test is skipped, as the wheel of some earlier build says nothing.
"""

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.wheel import make_wheel

# The tools are read through links; behind the link stands the source tree.
ROOT = Path(make_wheel.__file__).resolve().parents[2]
OPERATORS = "rl/_native/libtandem_loss.so"
REFIT = "rl/_native/libtandem_refit.so"
CUDA_KERNELS = "rl/_native/libtandem_cuda.so"  # of a build with --config=cuda
NAME = "tandem_rl-*-cp311-cp311-linux_x86_64.whl"


def find_wheel() -> Path:
    wheels = sorted(Path(make_wheel.__file__).parent.glob(NAME))
    if not wheels:
        pytest.skip("only Bazel builds the wheel: tools/bazel test //tests/unit/tools")
    return wheels[0]


@pytest.fixture(scope="module")
def archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(find_wheel())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has put the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(folder), str(find_wheel())], check=True, timeout=120)
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in an empty folder with the installed package on its path and nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RUNFILES"))}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(installed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def read_metadata(archive: zipfile.ZipFile, file: str) -> str:
    (name,) = [name for name in archive.namelist() if name.endswith(f".dist-info/{file}")]
    return archive.read(name).decode()


def test_it_holds_every_module_configuration_and_library_and_nothing_else(archive: zipfile.ZipFile) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rl").rglob("*.py")}
    assert "rl/core/reaper.py" in modules, "it runs as a script of its own, so nothing imports it"
    configurations = {f"rl/_configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    ours = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert ours - {CUDA_KERNELS} == modules | configurations | {OPERATORS, REFIT}


def test_the_files_are_those_of_the_tree(archive: zipfile.ZipFile) -> None:
    assert archive.testzip() is None
    assert archive.read("rl/core/reaper.py") == (ROOT / "rl/core/reaper.py").read_bytes()
    assert archive.read("rl/_configs/base.yaml") == (ROOT / "configs/base.yaml").read_bytes()
    for library in {OPERATORS, REFIT, CUDA_KERNELS} & set(archive.namelist()):
        assert archive.read(library).startswith(b"\x7fELF")
        assert archive.getinfo(library).external_attr >> 16 == 0o100755


def test_operators_and_cuda_kernels_go_where_the_one_finds_the_other() -> None:
    """Only a build with --config=cuda has the kernels, so the rule itself is read: it must put both in one folder."""
    rule = (ROOT / "tools/wheel/BUILD.bazel").read_text()
    places = dict(re.findall(r'"(//csrc/[^"]+)": "([^"]+)"', rule))
    libraries = ("//csrc/bindings:loss_ops", "//csrc/bindings:refit", "//csrc/cuda:tandem_cuda")
    assert places == dict.fromkeys(libraries, "rl/_native")
    assert re.search(r'"//third_party/cuda:enabled": dict\(_DATA\.items\(\) \+ _CUDA_DATA\.items\(\)\)', rule)


def test_the_record_names_every_file_with_its_hash_and_size(archive: zipfile.ZipFile) -> None:
    rows = [line.rsplit(",", 2) for line in read_metadata(archive, "RECORD").splitlines()]
    assert sorted(name for name, _, _ in rows) == sorted(archive.namelist())
    for name, digest, size in rows:
        if name.endswith("/RECORD"):
            continue
        content = archive.read(name)
        right = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={right}", len(content)), name


def test_the_command_and_the_requirements_stand_in_the_metadata(archive: zipfile.ZipFile) -> None:
    points = read_metadata(archive, "entry_points.txt").splitlines()
    assert points[points.index("[console_scripts]") + 1] == "tandem = rl.__main__:main"
    assert points[points.index("[vllm.general_plugins]") + 1] == "tandem = rl.generation.vllm.plugin:register"
    assert "Tag: cp311-cp311-linux_x86_64" in read_metadata(archive, "WHEEL").splitlines()
    lines = read_metadata(archive, "METADATA").splitlines()
    assert "Name: tandem-rl" in lines
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    always = [requirement for requirement in required if "extra ==" not in requirement]
    (torch,) = [requirement for requirement in required if re.match(r"torch\b", requirement)]
    assert re.fullmatch(r"torch>=[\d.]+", torch), "no build of torch is pinned: CPU or CUDA is the user's choice"
    assert not [requirement for requirement in always if requirement.startswith("vllm")]


def test_it_works_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    lines = ["import sys, rl, rl.ops.native_logprobs", "from rl.core.native import require_native", "require_native()"]
    lines += ["from rl.weights.refit_library import refit_library", "refit_library()"]
    done = run(installed, tmp_path, "-c", "; ".join([*lines, "print(rl.__file__)", "print(*sys.path)"]))
    assert done.returncode == 0, done.stderr
    place, path = done.stdout.splitlines()
    assert Path(place) == installed / "rl/__init__.py"
    assert str(ROOT) not in path.split()
    assert not [entry for entry in path.split() if Path(entry, "rl").exists() and Path(entry) != installed]


def test_a_shipped_configuration_can_be_read_from_it(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "rl", "config", "grpo_smollm2_cpu")
    assert done.returncode == 0, done.stderr
    assert "num_prompts_per_step: 8" in done.stdout


def test_a_dry_run_works_from_it(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "rl", "train", "--config", "grpo_smollm2_cpu", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("grpo_smollm2_cpu can run")
    assert list(tmp_path.iterdir()) == []


def test_its_command_is_on_the_path_of_an_installation(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, str(installed / "bin/tandem"), "--version")
    assert done.returncode == 0, done.stderr
    assert "0.1.0" in done.stdout
