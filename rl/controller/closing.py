"""Closing what a run or an evaluation has opened: bounded in time, and without hiding how the work itself ended."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

_log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 60.0


def without_masking(what: str, close: Callable[[], object]) -> None:
    """Close a part; an error of that is a warning, because how the run itself ended is what counts."""
    try:
        close()
    except Exception as error:
        _log.warning("closing %s failed: %s: %s", what, type(error).__name__, error, exc_info=True)


async def close_parts(stack: AsyncExitStack) -> None:
    """Close every part; what does not close in time is left to the reaper."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await stack.aclose()
    except TimeoutError:
        _log.warning("closing took longer than %.0f s; the run's cleaner ends the rest", CLOSE_TIMEOUT_S)
    except Exception as error:  # a boundary: whatever a part raises must not hide how the run ended
        _log.warning("a part of the run did not close cleanly: %s: %s", type(error).__name__, error, exc_info=True)
