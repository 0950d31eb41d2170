"""Check that files and functions stay small: 500 lines a file, 80 lines a Python function, 80 lines a C++ function.

A C++ function is measured by its braces in column 0, which is how clang-format lays out a function at namespace scope.

    python3 tools/check_sizes.py             # exit code 1 and one line per file or function that is too long
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE = 500
MAX_FUNCTION = 80
FOLDERS = ["rl", "csrc", "tools", "tests", "docs", "third_party"]
PYTHON = {".py"}
CPP = {".cc", ".h", ".cu", ".cuh", ".cpp"}
BUILD = {".bzl"}


def _python_functions(text: str, path: str) -> Iterator[tuple[str, int, int]]:
    for node in ast.walk(ast.parse(text, filename=path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def _cpp_functions(text: str) -> Iterator[tuple[str, int, int]]:
    signature, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line and not line[0].isspace() and line[0] not in "}#/":
            if not signature or line.endswith("{"):
                signature, start = line, start if signature and "(" not in line else number
            if "(" not in signature + line or line.startswith(("namespace", "struct", "class", "enum", "extern")):
                signature = ""
        if line.startswith("}"):
            if signature:
                yield signature.split("(")[0].split()[-1], start, number - start + 1
            signature = ""
        elif line.endswith(";") and line and not line[0].isspace():
            signature = ""


def find_violations(root: Path) -> Iterator[str]:
    """Yield one line per file or function above its limit."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    for path in paths:
        if path.suffix not in PYTHON | CPP | BUILD or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        if (length := text.count("\n")) > MAX_FILE:
            yield f"{name}:1: {length} lines; the limit for a file is {MAX_FILE}"
        functions = _python_functions(text, name) if path.suffix in PYTHON else _cpp_functions(text)
        for function, line, length in functions if path.suffix in PYTHON | CPP else ():
            if length > MAX_FUNCTION:
                yield f"{name}:{line}: {function} has {length} lines; the limit for a function is {MAX_FUNCTION}"


def main() -> int:
    """Print what is too long in the tree that this file stands in."""
    violations = list(find_violations(Path(__file__).resolve().parent.parent))
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
