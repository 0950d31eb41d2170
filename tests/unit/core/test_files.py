"""Tests of rl.core.files."""

import os
from pathlib import Path

import pytest

from rl.core.files import make_durable, replace_atomically


def test_a_replaced_file_has_the_new_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("old", "new\n"):
        replace_atomically(path, text)
    assert path.read_text() == "new\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_atomically(path, "old")
    (tmp_path / f".file.tmp-{os.getpid()}").mkdir()
    with pytest.raises(OSError):
        replace_atomically(path, "new")
    assert path.read_text() == "old"


def test_files_and_folders_can_be_made_durable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_durable(tmp_path / "file")
    make_durable(tmp_path)
    with pytest.raises(FileNotFoundError):
        make_durable(tmp_path / "nothing")
