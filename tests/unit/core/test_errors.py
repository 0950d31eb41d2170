"""What is taken from foreign errors."""

import pytest

from rl.core.errors import first_line


@pytest.mark.parametrize(
    ("text", "line"),
    [("one", "one"), ("\none  \n\npages of advice\n", "one"), ("", "ValueError"), (" \n", "ValueError")],
)
def test_the_first_line_of_an_error_is_told(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
