"""Waiting for several ranks."""

import asyncio

import pytest

from rl.cluster.calls import all_or_first_error


async def value(result):
    """Return at once."""
    return result


async def never(cancelled):
    """Wait for ever; note a cancellation."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(True)
        raise


async def fail():
    """Raise."""
    raise ValueError("rank fails")


async def test_results_come_in_order_and_nothing_is_nothing():
    assert await all_or_first_error([value(1), value(2)]) == [1, 2]
    assert await all_or_first_error([]) == []


async def test_the_first_error_ends_the_wait_and_names_who_was_busy():
    cancelled: list[bool] = []
    with pytest.raises(ValueError, match="rank fails") as caught:
        await all_or_first_error([never(cancelled), fail(), never(cancelled)])
    assert caught.value.__notes__ == ["ranks 0, 2 were still busy with the same call"]
    assert cancelled == [True, True]


async def test_cancelling_the_wait_cancels_the_calls():
    cancelled: list[bool] = []
    waiting = asyncio.ensure_future(all_or_first_error([never(cancelled)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert cancelled == [True]
