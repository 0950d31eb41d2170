"""The tests that rows about settings name exist, and speak of what the row says they show."""

import ast
from pathlib import Path

import pytest

from tests.support.knob_rows import ELSEWHERE
from tests.support.knobs import Elsewhere
from tools import check_layers

# The tools are read through links; behind the link stands the source tree.
ROOT = Path(check_layers.__file__).resolve().parent.parent


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.test)
def test_a_named_test_exists_and_names_the_settings(row: Elsewhere) -> None:
    text = (ROOT / row.file).read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert row.test in {function.name for function in functions}
    silent = [name for name in row.fields if name.partition(".")[2] not in text]
    assert silent == [], f"{row.file} does not speak of {', '.join(silent)}"
