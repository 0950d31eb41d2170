"""tools/bazel finds a Bazel, refuses one that is too new, says in one line what is missing. No real Bazel runs here."""

import os
import subprocess
from pathlib import Path

import pytest

from tools import build_files

WRAPPER = Path(build_files.__file__).resolve().with_name("bazel")
# What the script itself calls; the rest of the machine's PATH is hidden from it.
COMMANDS = ["cat", "dirname", "echo", "env", "mktemp", "rm", "tail", "xargs"]
BAZEL = """
if [ "$1" = --version ]; then echo "{version}"; exit; fi
printf '%s\\n' "{name} ran in $PWD" "$@"
exit 37
"""


class Machine:
    """A PATH of one folder, with everything that the wrapper looks for but Bazel."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.work = root / "a folder"
        self.bin.mkdir()
        self.work.mkdir()
        for command in COMMANDS:
            place = next(Path(folder, command) for folder in ["/usr/bin", "/bin"] if Path(folder, command).exists())
            (self.bin / command).symlink_to(place)
        self.add("g++", "exit 0")
        self.add("id", "echo 1000")
        self.variables = {"PATH": str(self.bin), "RL_PYTHON_VENV": "/anywhere", "TMPDIR": str(root)}

    def add(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    def add_bazel(self, name: str, version: str = "bazel 6.5.0") -> Path:
        return self.add(name, BAZEL.format(name=name, version=version))

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(WRAPPER), *arguments],
            cwd=self.work,
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_arguments_folder_and_exit_code_are_kept_and_nothing_is_said(machine: Machine) -> None:
    machine.add_bazel("bazel")
    done = machine.run("build", "//a:b c", "--define=x=$y", "")
    assert done.stdout.splitlines() == [f"bazel ran in {machine.work}", "build", "//a:b c", "--define=x=$y", ""]
    assert (done.returncode, done.stderr) == (37, "")


@pytest.mark.parametrize("version", ["bazel 4.2.3", "bazel 7.4.1", "bazel no_version"])
def test_releases_that_read_workspace_are_taken(machine: Machine, version: str) -> None:
    machine.add_bazel("bazel", version)
    assert machine.run("build").returncode == 37


@pytest.mark.parametrize("version", ["8.0.0", "9.1.0", "3.7.2", "10.0.0"])
def test_other_releases_are_refused_in_one_line(machine: Machine, version: str) -> None:
    place = machine.add_bazel("bazel", f"bazel {version}")
    done = machine.run("build")
    assert (done.returncode, done.stdout) == (127, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"tools/bazel: {place} is Bazel {version}, and this project needs 4 to 7")
    assert "USE_BAZEL_VERSION=6.5.0" in done.stderr


def test_a_bazel_that_does_not_answer_is_named(machine: Machine) -> None:
    machine.add("bazel", "exit 1")
    done = machine.run("build")
    assert (done.returncode, done.stderr) == (127, f"tools/bazel: {machine.bin}/bazel does not answer to --version\n")


def test_the_bazel_that_a_launcher_chose_comes_first_then_debians_then_bazelisk(machine: Machine) -> None:
    for name in ["bazel", "bazelisk", "bazel-4", "chosen"]:
        machine.add_bazel(name)
    assert machine.run("build", BAZEL_REAL=str(machine.bin / "chosen")).stdout.startswith("chosen ran")
    assert machine.run("build").stdout.startswith("bazel-4 ran")
    (machine.bin / "bazel-4").unlink()
    assert machine.run("build").stdout.startswith("bazelisk ran")


def test_bazelisk_is_told_which_release_to_fetch_unless_the_user_says_so(machine: Machine) -> None:
    machine.add("bazelisk", 'if [ "$1" = --version ]; then echo "bazel 6.5.0"; else echo "$USE_BAZEL_VERSION"; fi')
    assert machine.run("build").stdout == "6.5.0\n"
    assert machine.run("build", USE_BAZEL_VERSION="7.1.0").stdout == "7.1.0\n"


def test_it_does_not_call_itself(machine: Machine) -> None:
    (machine.bin / "bazel").symlink_to(WRAPPER)
    alone = machine.run("build", BAZEL_REAL=str(WRAPPER))
    assert (alone.returncode, len(alone.stderr.splitlines())) == (127, 1)
    machine.add_bazel("bazel-4")
    assert machine.run("build").stdout.startswith("bazel-4 ran")


def test_a_launcher_that_calls_back_runs_the_real_bazel_once(machine: Machine) -> None:
    real = machine.add_bazel("real")
    machine.add(
        "bazel",
        f'if [ "$PWD" = / ]; then exec {real} "$@"; fi\necho launcher\nBAZEL_REAL={real} exec {WRAPPER} "$@"',
    )
    done = machine.run("build", "x")
    assert done.stdout.splitlines() == ["launcher", f"real ran in {machine.work}", "build", "x"]
    assert (done.returncode, done.stderr) == (37, "")


def test_what_is_missing_is_named_in_one_line_where_it_may_not_install(machine: Machine) -> None:
    done = machine.run("build", CXX="no-compiler", RL_PYTHON="/no/python", RL_PYTHON_VENV="")
    assert (done.returncode, done.stdout) == (127, "")
    assert len(done.stderr.splitlines()) == 1
    words = (
        "tools/bazel: missing: bazel-bootstrap g++ python3 python3-venv python3-dev. Install them (Debian 12: apt-get"
    )
    assert done.stderr.startswith(words)


def test_the_sandbox_of_the_tests_is_named_when_it_is_missing(machine: Machine) -> None:
    machine.add_bazel("bazel")
    done = machine.run("test", "//...")
    assert done.returncode == 37 and "bubblewrap, which some tests need" in done.stderr
    assert machine.run("build", "//...").stderr == ""
    machine.add("bwrap", "exit 0")
    assert "bubblewrap" not in machine.run("test", "//...").stderr


def test_what_is_missing_is_installed_where_it_may(machine: Machine) -> None:
    source = machine.add_bazel("source")
    machine.add("id", "echo 0")
    machine.add("apt-get", f'echo "noise of $*"\nif [ "$1" = install ]; then mv {source} {machine.bin}/bazel-4; fi')
    (machine.bin / "mv").symlink_to("/bin/mv")
    done = machine.run("build")
    assert done.stdout.startswith("source ran")
    assert done.returncode == 37
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("tools/bazel: installing bazel-bootstrap")


def test_a_failing_installation_ends_with_its_last_lines_and_the_log(machine: Machine, tmp_path: Path) -> None:
    machine.add("id", "echo 0")
    machine.add("apt-get", "for i in {1..40}; do echo line $i; done; exit 100")
    done = machine.run("build")
    assert done.returncode == 127
    assert "line 40\n" in done.stderr and "line 20\n" not in done.stderr
    log = Path(done.stderr.split("the whole log is ")[1].strip())
    assert log.parent == tmp_path and "line 1\n" in log.read_text()


def test_the_wrapper_is_executable() -> None:
    assert os.access(WRAPPER, os.X_OK)
