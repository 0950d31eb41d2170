"""A refit that is cut off from outside, as by a signal to the run: every end gives up, and nothing is left behind."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.refit_faults import FaultyHfWorker
from tests.support.refit_world import World, started
from tests.support.waiting import wait_until

# Far below the deadline of a refit: nobody waited for it.
SOON_S = 8.0


async def cut_off(world: World) -> float:
    """Cancel a refit in mid-transfer: one reader loads nothing, so the sender waits for it. Returns the seconds."""
    assert world.sync is not None
    await world.plant(1, "slow receiver")
    refit = asyncio.ensure_future(world.publish())
    sync = world.sync
    await asyncio.to_thread(wait_until, lambda: sync.state == "DIRTY", "the transfer of the refit")
    begin = time.monotonic()
    refit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refit
    return time.monotonic() - begin


def test_a_cancelled_refit_leaves_engines_paused_and_links_closed_and_the_next_one_works(tmp_path: Path) -> None:
    async def play() -> None:
        async with started(tmp_path) as world:
            sync = await world.connect(timeout_s=60.0)
            await world.publish()
            assert await cut_off(world) < SOON_S
            assert sync.state == "DIRTY"
            for replica in (0, 1):
                assert await world.on(replica, FaultyHfWorker.is_paused)
            await world.assert_works()
            await cut_off(world)
            await sync.close()
            assert not list(Path("/dev/shm").glob(f"{world.run_tag}-refit-*"))

    asyncio.run(asyncio.wait_for(play(), 150))
