"""Errors become one block and an exit code."""

import pytest
import typer

from rl.cli.console import clean_errors
from rl.core.errors import ConfigError, InfraError, StallError


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (ConfigError("a [bold] key\nsecond line"), 2, "configuration error: a [bold] key\nsecond line\n"),
        (InfraError("engine gone"), 1, "failed (InfraError): engine gone\n"),
        (StallError("nothing moves " * 30), 1, f"failed (StallError): {'nothing moves ' * 30}\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_of_ours_is_one_block(
    error: BaseException, exit_code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, clean_errors():
        raise error
    assert caught.value.exit_code == exit_code
    assert capsys.readouterr().err == text


def test_any_other_error_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), clean_errors():
        raise ZeroDivisionError
