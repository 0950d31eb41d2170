"""Every kernel of csrc/loss and csrc/refit is written for the emulator, and runs in its tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent
FOLDERS = [CSRC / "loss", CSRC / "refit"]
FOREIGN = ("GTEST_", "TEST_", "TESTBRIDGE_", "XML_OUTPUT")


def kernels_of(source: str) -> set[str]:
    """Return the names of the kernels that a .cu file defines."""
    return set(re.findall(r"SIMT_KERNEL\([^)]*\)\s*(\w+)\(", source))


def kernels_that_run(binary: Path, record: Path) -> set[str]:
    """Run an emulated test; return the names of the kernels that it launched."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment |= {"SIMT_COVERAGE": str(record), "SIMT_STRICT": "1"}
    subprocess.run([str(binary), "--gtest_brief=1"], env=environment, check=True, stdout=subprocess.DEVNULL)
    return set(record.read_text(encoding="utf-8").split())


def test_kernel_files_are_written_in_simt_h() -> None:
    for path in (path for folder in FOLDERS for path in folder.glob("*.cu")):
        found = re.findall(r"<<<|__shared__|__global__|cuda_runtime|\basm\b", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} has {found}; csrc/common/simt.h says what to write"


def test_every_kernel_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [path for folder in FOLDERS for path in sorted(folder.glob("*.cu"))]
    defined = {name for path in files for name in kernels_of(path.read_text(encoding="utf-8"))}
    binaries = [path for folder in FOLDERS for path in sorted(folder.glob("*_emulated_test_seed0"))]
    assert defined and binaries
    ran: set[str] = set()
    for binary in binaries:
        ran |= kernels_that_run(binary, tmp_path / f"{binary.name}.txt")
    with capsys.disabled():
        sys.stdout.write(f"\n{len(ran & defined)} of {len(defined)} kernels ran, by {len(binaries)} tests\n")
    assert not defined - ran
