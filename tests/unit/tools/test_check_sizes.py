"""The size check finds long files and long functions in Python and in C++."""

from pathlib import Path

from tools.check_sizes import find_violations


def test_short_code_passes(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/a.py").write_text("def f():\n    return 1\n")
    assert list(find_violations(tmp_path)) == []


def test_a_long_python_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/a.py").write_text("def f():\n" + "    x = 1\n" * 80)
    assert list(find_violations(tmp_path)) == ["rl/a.py:1: f has 81 lines; the limit for a function is 80"]


def test_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/a.py").write_text("x = 1\n" * 501)
    assert list(find_violations(tmp_path)) == ["rl/a.py:1: 501 lines; the limit for a file is 500"]


def test_a_long_cpp_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    body = "  int x = 1;\n" * 80
    struct, short = f"struct S {{\n{body}}};\n", "void Short() {\n}\n"
    long = f"void Long(int a,\n          int b) {{\n{body}}}\n"
    (tmp_path / "csrc/a.cc").write_text("\n".join(["namespace t {\n", struct, short, long, "}\n"]))
    assert list(find_violations(tmp_path)) == ["csrc/a.cc:89: Long has 83 lines; the limit for a function is 80"]
