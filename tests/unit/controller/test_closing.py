"""Tests of rl.controller.closing."""

from contextlib import AsyncExitStack

import pytest

from rl.controller.closing import close_parts, without_masking


async def test_an_error_while_closing_is_logged_and_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise OSError("the socket is gone")

    with pytest.raises(ValueError, match="the first"):
        stack = AsyncExitStack()
        stack.push_async_callback(broken)
        try:
            raise ValueError("the first")
        finally:
            await close_parts(stack)
    assert "did not close cleanly: OSError: the socket is gone" in caplog.text


def test_a_part_that_cannot_be_closed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise OSError("no terminal")

    without_masking("the summary", broken)
    assert "closing the summary failed: OSError: no terminal" in caplog.text
