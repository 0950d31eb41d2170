"""The whole tree keeps the house rules: layers, sizes, generated BUILD files."""

import re
from pathlib import Path

from tools import build_files, check_layers, check_sizes

# The tools are read through links; behind the link stands the source tree.
ROOT = Path(check_layers.__file__).resolve().parent.parent


def test_imports_follow_the_layers() -> None:
    assert list(check_layers.find_violations(ROOT)) == []


def test_the_layers_are_those_of_the_folders_and_of_the_architecture() -> None:
    folders = {path.parent.name for path in (ROOT / "rl").glob("*/__init__.py")}
    assert set(check_layers.LAYERS) == folders
    assert set(build_files.VISIBILITY) == folders
    picture = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    rows = {int(line[1]): line for line in picture.splitlines() if line[:1] == "L"}
    for package, layer in check_layers.LAYERS.items():
        assert re.search(rf"\b{package}\b", rows[min(layer, 4)]), f"{package} is not in row L{layer} of ARCHITECTURE.md"


def test_files_and_functions_are_small() -> None:
    assert list(check_sizes.find_violations(ROOT)) == []


def test_build_files_say_what_the_imports_say() -> None:
    wanted = build_files.Generator(ROOT).files()
    stale = [
        str(path.relative_to(ROOT)) for path, text in wanted.items() if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run: python3 tools/build_files.py"
