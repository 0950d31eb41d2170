"""The whole tree keeps the house rules: layers, sizes, generated BUILD files."""

from pathlib import Path

from tools import build_files, check_layers, check_sizes

# The tools are read through links; behind the link stands the source tree.
ROOT = Path(check_layers.__file__).resolve().parent.parent


def test_imports_follow_the_layers() -> None:
    assert list(check_layers.find_violations(ROOT)) == []


def test_files_and_functions_are_small() -> None:
    assert list(check_sizes.find_violations(ROOT)) == []


def test_build_files_say_what_the_imports_say() -> None:
    wanted = build_files.Generator(ROOT).files()
    stale = [
        str(path.relative_to(ROOT)) for path, text in wanted.items() if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run: python3 tools/build_files.py"
