"""Every bug of planted_bugs.toml is caught, and by the check that the table names; the shipped kernels pass.

The binaries beside this file are shipped tests, with a kernel as it is (`NAME_without`) and with the bug (`NAME`).
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
BUGS: list[dict[str, Any]] = tomllib.loads((FOLDER / "planted_bugs.toml").read_text(encoding="utf-8"))["bug"]
SEEDS = [0, 3, 7, 11]
SANITIZER_OPTIONS = {"ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
# Bazel's and googletest's words to this test, which its binaries must not take for theirs.
FOREIGN = ("GTEST_", "TEST_", "TESTBRIDGE_", "XML_OUTPUT")


def run(binary: str, bug: dict[str, Any], *, seed: int, strict: bool = True) -> tuple[int, str]:
    """Run a test binary of this folder; return its exit code and what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment |= SANITIZER_OPTIONS | {"SIMT_SEED": str(seed), "SIMT_STRICT": str(int(strict))}
    command = [str(FOLDER / binary), f"--gtest_filter={bug['filter']}", "--gtest_brief=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_the_shipped_kernel_passes(bug: dict[str, Any]) -> None:
    code, output = run(f"{bug['name']}_without", bug, seed=SEEDS[0])
    assert code == 0, output[-4000:]
    assert re.search(r"\[  PASSED  \] [1-9]\d* test", output), f"no case matches {bug['filter']}"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_the_bug_is_caught_whatever_the_schedule(bug: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for seed in SEEDS:
        code, output = run(bug["name"], bug, seed=seed)
        assert code != 0, f"seed {seed} passes"
        for report in bug["report"]:
            assert re.search(report, output), f"seed {seed} does not report {report!r}:\n{output[:4000]}"
        if seed == 0:
            first = re.search(bug["report"][0], output)
    with capsys.disabled():
        sys.stdout.write(f"\n{bug['name']}: {bug['what']} ({Path(bug['file']).name})\n")
        sys.stdout.write(f"    caught by {bug['caught_by']}: {first and first[0]}\n")


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.get("lenient")], ids=lambda bug: bug["name"])
def test_without_strict_mode_it_passes(bug: dict[str, Any]) -> None:
    code, output = run(bug["name"], bug, seed=0, strict=False)
    assert code == 0, output[-4000:]


def test_the_table_has_the_eight_kinds() -> None:
    assert len(BUGS) == 8
    assert {bug["caught_by"] for bug in BUGS} == {
        "address",
        "deadlock",
        "divergence",
        "early exit",
        "mask",
        "race or uninitialised",
        "undefined",
        "uninitialised",
    }
