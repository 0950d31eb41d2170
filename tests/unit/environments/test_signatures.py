"""What a reward function needs is read from its source, or is not known."""

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from rl.environments.signatures import needed_columns

SOURCE = """\
import functools
from elsewhere import imported

def plain(prompts, completions, answer, level=1, *, hard, bonus=0, **columns): ...
async def waits(completions, answer): ...
@functools.cache
def decorated(completions, answer): ...
def made_again(completions, answer): ...
made_again = functools.partial(made_again, answer=1)
"""


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        ("plain", {"answer", "hard"}),
        ("waits", {"answer"}),
        ("decorated", None),
        ("made_again", None),
        ("imported", None),
        ("nowhere", None),
    ],
)
def test_the_columns_are_those_without_a_default(tmp_path: Path, function: str, columns: set[str] | None) -> None:
    (tmp_path / "some_rewards.py").write_text(SOURCE)
    spec = PathFinder.find_spec("some_rewards", [str(tmp_path)])
    assert spec is not None
    assert needed_columns(spec, function) == columns
