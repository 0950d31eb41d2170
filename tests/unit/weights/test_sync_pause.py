"""How a refit stops the generators and lets them go on, when some of them are slow, hang or die."""

import pytest

from rl.core.errors import InfraError
from rl.weights.report import RefitError
from tests.support.refit_scene import Scene
from tests.support.virtual_loop import virtually


async def test_a_paused_fleet_is_not_paused_again_for_a_retry() -> None:
    """An engine that died would answer that call too late, or with less than its handle says."""
    scene = await Scene().connected()
    scene.fail_once(1, "start", RuntimeError("not now"))
    assert (await scene.sync.publish(0)).attempts == 2
    assert scene.fleet.replicas[0].modes == ["keep"]
    await scene.sync.publish(1)
    assert scene.fleet.replicas[0].modes == ["keep", "keep"]
    scene.assert_loaded(1)


@virtually
async def test_a_pause_that_never_ends_is_named() -> None:
    scene = await Scene(timeout_s=0.05).connected()
    for replica in scene.fleet.replicas:
        replica.hang_at = "pause"
    words = (
        r"failed at pause in attempt 2: generation\[0\]: pause did not end within .*timeout_s=0.05 was spent on pause"
    )
    with pytest.raises(RefitError, match=words) as got:
        await scene.sync.publish(0)
    assert got.value.state == "CLEAN"
    assert scene.fleet.num_replicas == 2, "all are merely slow"


@pytest.mark.parametrize(("is_stopped", "attempts"), [(True, 2), (False, 3)])
@virtually
async def test_a_replica_that_hangs_before_the_pause_is_given_up(is_stopped: bool, attempts: int) -> None:
    scene = await Scene(timeout_s=0.05).connected()
    if is_stopped:
        scene.fleet.replicas[1].is_stopped = True  # it takes no abort: one attempt is enough to know
    else:
        scene.fleet.replicas[1].hang_at = "pause"
    assert (await scene.sync.publish(0)).attempts == attempts
    assert list(scene.fleet.removed) == ["generation[1]"]
    scene.assert_loaded(0)


@virtually
async def test_a_drain_that_takes_longer_than_one_attempt_costs_no_replica() -> None:
    scene = await Scene(timeout_s=0.05).connected()
    slow = scene.fleet.replicas[1]
    slow.hang_at = "pause"

    def finished(phase: str) -> None:
        if phase == "pause" and slow.modes == []:
            slow.hang_at = None  # by the second time it is asked

    scene.fleet.replicas[0].at = lambda phase: finished(phase) if scene.fleet.replicas[0].modes else None
    assert (await scene.sync.publish(0)).attempts == 2
    assert scene.fleet.removed == {}
    scene.assert_loaded(0)


async def test_a_replica_that_dies_before_it_resumes_is_given_up_and_the_rest_resume() -> None:
    scene = await Scene().connected()
    scene.fail_always(0, "resume", InfraError("its process is gone"))
    report = await scene.sync.publish(0)
    assert (report.attempts, report.replicas, list(scene.fleet.removed)) == (2, 1, ["generation[0]"])
    scene.assert_loaded(0)
