"""make_env.py with a tiny lock, a torch of three lines and an installer of our own: offline, in seconds.

The installer stands in for uv and hands the work to pip, which checks the hashes for real.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.wheel import make_wheel

SCRIPT = Path(make_wheel.__file__).parents[2] / "third_party/python/make_env.py"
FLAVORS = '[cpu]\nlock = "lock.cpu.txt"\ntorch_index = "https://nowhere.invalid/cpu"\n'
TORCH = {
    "torch/__init__.py": b'from torch import _C\n__version__ = "2.0+tiny"\n',
    "torch/_C.py": b"_GLIBCXX_USE_CXX11_ABI = 1\n",
}
FAKE_UV = b"""
import os, subprocess, sys

def main():
    words = sys.argv[1:]
    if words[0] == "venv":
        return subprocess.call([sys.executable, "-m", "venv", "--without-pip", words[-1]])
    if "HALT_AT" in os.environ:
        print("halfway", flush=True)
        open(os.environ["HALT_AT"]).read()  # a pipe that nobody writes to
    words = [word for word in words[2:] if word not in ("--system-certs", "--compile-bytecode")]
    at = words.index("--python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words[at : at + 2], "install", "--no-index"]
    return subprocess.call([*pip, *words[:at], *words[at + 2 :]])
"""


def pack(folder: Path, name: str, files: dict[str, bytes], **scripts: str) -> str:
    """Write a wheel; return its line for a lock file."""
    project: dict[str, Any] = {
        "name": name,
        "version": "2.0",
        "description": "tiny",
        "license": {"text": "Apache-2.0"},
        "requires-python": ">=3.11",
        "dependencies": [],
        "scripts": scripts,
    }
    wheel = folder / f"{name}-2.0-py3-none-any.whl"
    make_wheel.write_wheel(wheel, project, "py3-none-any", files)
    return f"{name}==2.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


class Checkout:
    """A third_party/python folder of its own, its wheels, and a cache of environments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        self.cache = root / "cache"
        self.wheels.mkdir(parents=True)
        shutil.copy(SCRIPT, root / "make_env.py")
        (root / "flavors.toml").write_text(FLAVORS)
        (root / "uv.txt").write_text(pack(self.wheels, "uv", {"fake_uv.py": FAKE_UV}, uv="fake_uv:main"))
        self.torch_line = pack(self.wheels, "torch", TORCH)
        (root / "lock.cpu.txt").write_text(self.torch_line)
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("RL_", "PIP_", "PYTHON"))
        }
        self.variables |= {"RL_ENV_CACHE": str(self.cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-I", str(self.root / "make_env.py"), *arguments],
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **variables)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout") / "third_party")


@pytest.fixture(scope="module")
def made(checkout: Checkout) -> Path:
    """An environment that is there already."""
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_the_report_says_where_everything_is(checkout: Checkout, made: Path, tmp_path: Path) -> None:
    done = checkout.run("--report", str(tmp_path / "env.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "env.json").read_text())
    assert (report["home"], report["python"]) == (str(made), str(made / "bin/python"))
    assert (report["torch_version"], report["torch_cxx11_abi"], report["version"]) == ("2.0+tiny", 1, "3.11")
    assert Path(report["site_packages"], "torch/_C.py").exists()


def test_a_second_caller_takes_what_is_there(checkout: Checkout, made: Path) -> None:
    done = checkout.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{made}\n", "")


def test_two_callers_at_once_build_one_environment(checkout: Checkout, made: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(next(checkout.cache.glob("uv-*/")), cache / next(checkout.cache.glob("uv-*/")).name, symlinks=True)
    callers = [checkout.start(RL_ENV_CACHE=str(cache)) for _ in range(2)]
    answers = [caller.communicate(timeout=120) for caller in callers]
    assert [caller.returncode for caller in callers] == [0, 0], answers
    assert [output for output, _ in answers] == [f"{cache / made.name}\n"] * 2
    assert "".join(errors for _, errors in answers).count("building /") == 1


def test_a_wrong_hash_ends_with_the_installers_last_lines(checkout: Checkout, made: Path) -> None:
    lock = checkout.root / "lock.cpu.txt"
    lock.write_text(f"torch==2.0 --hash=sha256:{'0' * 64}\n")
    try:
        done = checkout.run()
    finally:
        lock.write_text(checkout.torch_line)
    assert (done.returncode, done.stdout) == (1, "")
    assert "installing lock.cpu.txt failed with exit code 1; the whole log is " in done.stderr
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr.split("failed with exit code")[1]
    assert "Traceback" not in done.stderr
    assert checkout.run().stdout == f"{made}\n"


def test_an_environment_whose_builder_was_killed_is_built_again(checkout: Checkout, made: Path, tmp_path: Path) -> None:
    (checkout.root / "lock.cpu.txt").write_text(f"# Another lock.\n{checkout.torch_line}")
    os.mkfifo(tmp_path / "halt")
    before = set(checkout.cache.glob("*/"))
    try:
        builder = checkout.start(HALT_AT=str(tmp_path / "halt"))
        assert builder.stderr is not None
        while "halfway" not in (line := builder.stderr.readline()):
            assert line, "it ended before the installation"
        os.killpg(builder.pid, signal.SIGKILL)
        builder.wait(10)
        (half,) = set(checkout.cache.glob("*/")) - before
        assert not (half / ".complete").exists()
        (half / "left over").touch()
        again = checkout.run()
    finally:
        (checkout.root / "lock.cpu.txt").write_text(checkout.torch_line)
    assert (again.returncode, again.stdout) == (0, f"{half}\n"), again.stderr
    assert "building /" in again.stderr
    assert (half / ".complete").exists()
    assert not (half / "left over").exists()


def test_an_environment_of_the_users_own_is_used_as_it_is(checkout: Checkout, made: Path, tmp_path: Path) -> None:
    done = checkout.run(RL_PYTHON_VENV=str(made), RL_ENV_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{made}\n", "")
    assert not (tmp_path / "cache").exists()


def test_what_is_no_environment_or_no_flavour_is_named_in_one_line(checkout: Checkout, tmp_path: Path) -> None:
    nothing = checkout.run(RL_PYTHON_VENV=str(tmp_path / "nothing"))
    assert nothing.returncode == 1
    assert nothing.stderr == (
        f"{tmp_path}/nothing/bin/python does not exist; RL_PYTHON_VENV must name the folder of a virtual environment\n"
    )
    unknown = checkout.run(RL_FLAVOR="tpu")
    assert (unknown.returncode, unknown.stderr) == (1, "RL_FLAVOR=tpu is unknown; choose one of cpu\n")
