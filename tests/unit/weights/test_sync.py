"""The refit transaction: all replicas or none, errors that name who began it, and a retry that starts clean."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from rl.core.clock import SystemClock
from rl.core.errors import InfraError, WeightSyncError
from rl.weights.faults import TransferError
from rl.weights.report import RefitError
from rl.weights.transport import Ack
from tests.support.refit_fakes import NAMES, never, word
from tests.support.refit_scene import Scene
from tests.support.virtual_loop import virtually


async def test_every_replica_gets_every_version_and_the_report_says_what_moved() -> None:
    scene = await Scene(num_readers=2).connected()
    for version in range(3):
        report = await scene.sync.publish(version)
        scene.assert_loaded(version)
        assert (report.version, report.bytes, report.tensors, report.replicas) == (version, 96, 6, 2)
        assert (report.attempts, report.changed) == (1, 6)
        assert report.seconds >= report.parts["pause"] + report.parts["transfer"] + report.parts["commit"]
    assert report.parts["gather"] == 0.75 and report.parts["load"] == 2.0
    assert report.parts["wire"] == 1.5, "the slowest end counts"
    assert [replica.modes for replica in scene.fleet.replicas] == [["keep"] * 3] * 2
    assert len(scene.sender.requests) == 1, "links are made once"
    assert scene.sender.requests[0].readers == (
        "generation[0].0", "generation[0].1", "generation[1].0", "generation[1].1",
    )  # fmt: skip
    assert [replica.first for replica in scene.fleet.replicas] == [0, 2]


async def test_readers_are_numbered_over_replicas_and_servers() -> None:
    scene = await Scene(replicas=2, num_readers=2, servers=1).connected()
    await scene.sync.publish(0)
    assert scene.servers[0].first == 4
    scene.assert_loaded(0)


@pytest.mark.parametrize("phase", ["start", "update 0", "update 5", "finish"])
async def test_a_fault_that_passes_costs_one_retry_with_new_links_and_a_higher_epoch(phase: str) -> None:
    scene = await Scene().connected()
    scene.fail_once(1, phase, RuntimeError("a hiccup"))
    report = await scene.sync.publish(4)
    scene.assert_loaded(4)
    assert report.attempts == 2
    assert len(scene.sender.requests) == 2
    assert scene.sender.requests[0].channel != scene.sender.requests[1].channel
    assert scene.sender.epochs == sorted(set(scene.sender.epochs))


@pytest.mark.parametrize(
    ("phase", "named", "state"),
    [("start", "start", "CLEAN"), ("update 2", "transfer", "DIRTY"), ("finish", "commit", "DIRTY")],
)
async def test_a_failing_replica_is_named_with_its_phase_and_nobody_generates(
    phase: str, named: str, state: str
) -> None:
    scene = await Scene().connected()
    scene.fail_always(1, phase, RuntimeError("the device is full"))
    with pytest.raises(RefitError, match=r"refit of version 4 failed at .* generation\[1\]: the device is full") as got:
        await scene.sync.publish(4)
    assert (got.value.phase, got.value.state, got.value.end, got.value.attempts) == (named, state, "generation[1]", 2)
    assert scene.sync.state == state
    await scene.assert_next_works(4)


@pytest.mark.parametrize("phase", ["send 0", "send 5"])
async def test_a_failing_sender_is_named(phase: str) -> None:
    scene = await Scene().connected()

    def fail(at: str) -> None:
        if at == phase:
            raise RuntimeError("out of memory")

    scene.sender.at = fail
    with pytest.raises(RefitError, match="the trainer: out of memory") as got:
        await scene.sync.publish(1)
    assert got.value.state == "DIRTY"
    await scene.assert_next_works(1)


async def test_a_trainer_that_died_is_not_tried_again() -> None:
    scene = await Scene().connected()

    def fail(at: str) -> None:
        if at == "send 1":
            raise InfraError("policy[0] died during send")

    scene.sender.at = fail
    with pytest.raises(RefitError, match="the trainer: policy") as got:
        await scene.sync.publish(1)
    assert got.value.attempts == 1


async def test_a_replica_that_dies_leaves_the_fleet_and_the_rest_go_on() -> None:
    scene = await Scene(replicas=3).connected()
    await scene.sync.publish(0)
    dying = scene.fleet.replicas[1]
    dying.at = lambda phase: dying.die() if phase == "update 3" else None
    report = await scene.sync.publish(1)
    assert report.replicas == 2
    assert list(scene.fleet.removed) == ["generation[1]"]
    assert "died during update 3" in scene.fleet.removed["generation[1]"]
    scene.assert_loaded(1)


async def test_a_replica_that_was_removed_between_refits_is_not_waited_for() -> None:
    scene = await Scene(replicas=2).connected()
    await scene.sync.publish(0)
    await scene.fleet.remove_replica("generation[0]", "its engine died")
    assert (await scene.sync.publish(1)).attempts == 1
    scene.assert_loaded(1)


async def test_a_replica_that_dies_is_an_error_where_too_few_would_be_left() -> None:
    scene = await Scene(replicas=2, min_replicas=2).connected()
    scene.fleet.replicas[0].is_dead = True
    with pytest.raises(RefitError, match=r"generation\[0\] died during"):
        await scene.sync.publish(0)
    assert scene.fleet.num_replicas == 2 and scene.fleet.is_paused


async def test_the_last_replica_is_not_given_up() -> None:
    scene = await Scene(replicas=1).connected()
    scene.fleet.replicas[0].is_dead = True
    with pytest.raises(RefitError, match="died during") as got:
        await scene.sync.publish(0)
    assert got.value.attempts == 2


async def test_a_server_that_is_gone_is_refitted_no_more() -> None:
    scene = await Scene(replicas=1, servers=2).connected()
    scene.servers[0].is_dead = True
    scene.servers = [scene.servers[1]]
    report = await scene.sync.publish(0)
    assert report.replicas == 2
    scene.assert_loaded(0)
    assert [server.replica for server in scene.sync.servers] == ["http://10.0.0.1"]


async def test_a_server_is_paused_while_it_is_refitted() -> None:
    scene = await Scene(replicas=1, servers=1).connected()
    server = scene.servers[0]
    await scene.sync.publish(0)
    assert server.modes == ["keep"]
    scene.assert_loaded(0)


@virtually
async def test_a_replica_that_hangs_is_given_up_at_the_deadline() -> None:
    scene = await Scene(timeout_s=0.1).connected()
    scene.fleet.replicas[0].hang_at = "update 1"
    report = await scene.sync.publish(7)
    assert list(scene.fleet.removed) == ["generation[0]"]
    assert "did not answer" in scene.fleet.removed["generation[0]"]
    assert report.replicas == 1
    scene.assert_loaded(7)


@virtually
async def test_the_only_replica_that_hangs_ends_the_refit_at_the_deadline_and_is_named() -> None:
    scene = await Scene(replicas=1, timeout_s=0.1).connected()
    scene.fleet.replicas[0].hang_at = "update 1"
    with pytest.raises(
        RefitError, match=r"generation\[0\]: did not answer.*; .*timeout_s=0.1 was spent on transfer 0.1 s"
    ) as got:
        await scene.sync.publish(7)
    assert got.value.state == "DIRTY"
    await scene.assert_next_works(7)


@virtually
async def test_a_deadline_that_an_end_itself_reports_names_the_setting_and_what_used_it_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = await Scene(timeout_s=8.0).connected()
    scene.fail_always(1, "update 2", TransferError("bucket 3 was not taken in time", "deadline"))

    loop = asyncio.get_running_loop()

    class Slow(SystemClock):
        """Five seconds pass while the generators pause."""

        def now(self) -> float:
            return loop.time() + (5.0 if scene.fleet.replicas[0].modes else 0.0)

    scene.sync._clock = Slow()
    setting = "bucket 3 was not taken in time; policy.generation.refit_cfg.timeout_s=8 was spent on"
    with caplog.at_level("WARNING"), pytest.raises(RefitError, match=f"{setting} transfer 8.0 s"):
        await scene.sync.publish(7)
    assert f"{setting} pause 5.0 s, transfer 3.0 s" in caplog.text
    await scene.assert_next_works(7)


@virtually
async def test_a_set_up_that_is_late_names_the_setting() -> None:
    scene = Scene(timeout_s=0.1)
    scene.fleet.replicas[1].hang_at = "init"
    with pytest.raises(WeightSyncError, match=r"generation\[1\] failed at connect: .*timeout_s=0.1 was spent on"):
        await scene.sync.connect()


@virtually
async def test_a_sender_that_hangs_ends_at_the_deadline_and_is_named() -> None:
    scene = await Scene(timeout_s=0.1).connected()
    scene.sender.hang_at = "send 1"
    with pytest.raises(RefitError, match="the trainer: did not answer"):
        await scene.sync.publish(7)
    assert scene.fleet.num_replicas == 2, "whoever waits for the trainer is not to blame"
    await scene.assert_next_works(7)


@virtually
async def test_a_failure_ends_an_end_that_waits_for_it_at_once() -> None:
    scene = await Scene(timeout_s=60).connected()
    scene.sender.hang_at = "send 1"
    scene.fail_always(0, "update 0", RuntimeError("lost"))
    with pytest.raises(RefitError, match=r"generation\[0\]: lost"):
        await asyncio.wait_for(scene.sync.publish(1), 30)  # twice the patience with one that hangs, no deadline
    await scene.assert_next_works(1)


async def test_a_peer_that_cannot_be_reached_twice_leaves_the_fleet() -> None:
    """A partition: its process lives and obeys, but nothing arrives there."""
    scene = await Scene(replicas=2).connected()
    lost = scene.fleet.replicas[1]

    def partition(phase: str) -> None:
        if phase == "update 2":
            assert lost._wire is not None
            lost._wire.break_off(TransferError("connection reset", "peer lost", (1 << 16) + lost.first, 2))

    lost.at = partition
    report = await scene.sync.publish(1)
    assert report.attempts == 3
    assert list(scene.fleet.removed) == ["generation[1]"]
    scene.assert_loaded(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ack: None, "confirms nothing"),
        (lambda ack: replace(ack, version=3), "confirms version 3, published was 4"),
        (lambda ack: replace(ack, num_tensors=5), "loaded 5 of 6 tensors"),
        (lambda ack: replace(ack, digests=()), "0 of them gave digests"),
        (lambda ack: replace(ack, digests=(b"",)), "0 bytes of digests for 6 tensors"),
    ],
)
async def test_a_confirmation_that_says_less_than_everything_is_an_error(change: Any, words: str) -> None:
    scene = await Scene().connected()
    scene.fleet.replicas[1].change_ack = change
    with pytest.raises(RefitError, match=words) as got:
        await scene.sync.publish(4)
    assert got.value.end == "generation[1]"
    await scene.assert_next_works(4)


async def test_bytes_that_differ_name_tensor_layer_and_reader() -> None:
    scene = await Scene(num_readers=2).connected()
    await scene.sync.publish(3)

    def other(ack: Ack) -> Ack:
        first, second = ack.digests
        return replace(ack, digests=(first, second[:16] + b"x" * 8 + second[24:]))

    scene.fleet.replicas[1].change_ack = other
    with pytest.raises(
        RefitError, match=r"generation\[1\]\.1 holds other bytes .* 'model\.layers\.2\.weight'.*layer 2"
    ):
        await scene.sync.publish(4)


async def test_a_stale_tensor_is_told_by_the_version_before() -> None:
    scene = await Scene().connected()
    await scene.sync.publish(3)
    scene.fleet.replicas[0].change = lambda one: one.replace("@4", "@3") if ".5." in one else one
    with pytest.raises(RefitError, match=r"'model\.layers\.5\.weight'.*stale, the bytes are those of version 3"):
        await scene.sync.publish(4)


async def test_swapped_names_are_told_by_the_other_tensors_bytes() -> None:
    scene = await Scene().connected()
    swap = {word(NAMES[1], 0): word(NAMES[2], 0), word(NAMES[2], 0): word(NAMES[1], 0)}
    scene.fleet.replicas[0].change = lambda one: swap.get(one, one)
    with pytest.raises(RefitError, match=r"layers\.1\.weight'.*those of 'model\.layers\.2\.weight'.*2 tensors differ"):
        await scene.sync.publish(0)


async def test_what_must_be_done_before_the_resume_finds_every_replica_committed_and_paused() -> None:
    scene = await Scene().connected()
    seen: list[Any] = []

    async def before_resume() -> None:
        seen.append((scene.fleet.is_paused, [replica.version for replica in scene.fleet.replicas], scene.sync.version))

    await scene.sync.publish(4, before_resume)
    assert seen == [(True, [4, 4], None)]
    scene.assert_loaded(4)
    scene.fail_once(1, "finish", RuntimeError("a hiccup"))
    await scene.sync.publish(5, before_resume)
    assert seen[1:] == [(True, [5, 5], 4)], "an attempt that fails before it does not come to it"


async def test_what_fails_before_the_resume_costs_a_retry_and_then_the_refit() -> None:
    scene = await Scene().connected()
    calls = 0

    async def fail(times: int) -> None:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise InfraError("generation[1] did not wake")

    assert (await scene.sync.publish(3, lambda: fail(1))).attempts == 2
    scene.assert_loaded(3)
    calls = 0
    with pytest.raises(
        RefitError, match=r"failed at wake in attempt 2: the generator: generation\[1\] did not wake"
    ) as got:
        await scene.sync.publish(4, lambda: fail(2))
    assert (got.value.phase, got.value.state, scene.fleet.num_replicas) == ("wake", "DIRTY", 2)
    await scene.assert_next_works(4)


@virtually
async def test_what_never_ends_before_the_resume_ends_with_the_refits_deadline() -> None:
    scene = await Scene(timeout_s=0.1).connected()
    with pytest.raises(RefitError, match="failed at wake in attempt 2: the generator: did not answer"):
        await scene.sync.publish(4, never)
    await scene.assert_next_works(4)


async def test_versions_only_grow() -> None:
    scene = await Scene().connected()
    await scene.sync.publish(5)
    for version in (5, 4):
        with pytest.raises(WeightSyncError, match=f"version {version} refused: the generators hold version 5"):
            await scene.sync.publish(version)
    scene.assert_loaded(5)


async def test_two_refits_at_once_are_refused() -> None:
    scene = await Scene().connected()
    first = asyncio.ensure_future(scene.sync.publish(0))
    await asyncio.sleep(0)
    with pytest.raises(WeightSyncError, match="while another one is under way"):
        await scene.sync.publish(1)
    await first
    scene.assert_loaded(0)


async def test_what_updates_nothing_is_an_error() -> None:
    scene = Scene(replicas=0)
    with pytest.raises(WeightSyncError, match="no replica"):
        await scene.sync.connect()
    with pytest.raises(WeightSyncError, match="before connect"):
        await scene.sync.publish(0)
    empty = Scene()
    empty.sender.manifest_now = ()
    with pytest.raises(WeightSyncError, match="no tensor to send"):
        await empty.sync.connect()


async def test_a_replica_that_refuses_the_tensors_ends_the_set_up_and_is_named() -> None:
    scene = Scene(timeout_s=5)
    scene.fail_always(1, "init", WeightSyncError("'lm_head.weight' has another shape"))
    with pytest.raises(WeightSyncError, match=r"cannot be set up: generation\[1\] failed at connect: 'lm_head"):
        await asyncio.wait_for(scene.sync.connect(), 4)


@virtually
async def test_a_cancelled_refit_stays_cancelled_and_leaves_the_generator_paused() -> None:
    scene = await Scene().connected()
    scene.fleet.replicas[0].hang_at = "update 2"
    task = asyncio.ensure_future(scene.sync.publish(1))
    while not scene.fleet.replicas[1].weights:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.sync.state == "DIRTY"
    await scene.assert_next_works(1)


async def test_the_transport_gets_what_the_settings_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = await Scene(transport="tcp", bucket_mib=2.0, num_buffers=7).connected()
    request = scene.sender.requests[0]
    assert (request.transport, request.bucket_bytes, request.num_slots) == ("tcp", 2 << 20, 7)
    assert request.channel.startswith("tdm-test-refit-")
    assert 19 < request.timeout_s <= 20
    assert "refits go over tcp: up to 7 buckets of at most 2 MiB under way" in caplog.text


async def test_explain_names_the_first_tensor_that_computes_otherwise() -> None:
    scene = await Scene().connected()
    assert await scene.sync.explain("float32") is None
    scene.fleet.replicas[1].signed[NAMES[4]] = (2.0, 1.0)
    assert await scene.sync.explain("float32") == (
        "generation[1] computes with another tensor than the trainer: 'model.layers.4.weight': W x is [1, 1, ..., sum "
        "1] at the trainer, [2, 1, ..., sum 2] at the generator (layer 4)"
    )
