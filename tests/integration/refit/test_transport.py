"""The transport between real processes: whoever dies, hangs or comes late, all learn of it in time and the next works.

Each fault runs over shared memory and over TCP. Ends are halted at a bucket in the middle of a refit, so that a fault
falls where it is meant to.
"""

import logging
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl.core.errors import WeightSyncError
from rl.weights.faults import TransferError
from rl.weights.transport import RefitStart, TransportName
from tests.support.refit_processes import (
    MIDDLE,
    TIMEOUT_S,
    WAIT_S,
    ReceiverProcess,
    SenderProcess,
    channel_name,
    connect,
    refit,
    request_of,
    segments,
)

_log = logging.getLogger(__name__)
# A death is an event; a stop is known by silence, of 3 s over TCP and at the refit's own deadline in shared memory.
DEATH_S = 5.0
STOP_DEADLINE_S = 5.0

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture(autouse=True)
def no_segment_stays() -> Any:
    before = segments()
    yield
    assert segments() == before


def failure_of(call: "Future[Any]", within_s: float) -> TransferError:
    """The typed error of a call, which it raised in time."""
    begin = time.monotonic()
    error = call.exception(within_s)
    _log.info("after %.2f s: %s", time.monotonic() - begin, error)
    assert isinstance(error, TransferError), error
    return error


def test_weights_arrive_bit_for_bit_at_processes_that_load_in_different_ways(transport: TransportName) -> None:
    with (
        SenderProcess() as sender,
        ReceiverProcess("generation[0]") as in_place,
        ReceiverProcess("generation[1]", is_staged=True) as staged,
    ):
        connect(sender, [in_place, staged], request_of(transport, 2))
        for version in (1, 2, 3):
            expected = sender.call("change", version).result(WAIT_S)
            refit(sender, [in_place, staged], RefitStart(version, version, TIMEOUT_S))
            assert in_place.call("held").result(WAIT_S) == expected
        sender.call("close").result(WAIT_S)


def test_a_sender_that_dies_mid_bucket_is_named_by_every_reader_and_a_new_one_takes_over(
    transport: TransportName,
) -> None:
    with ReceiverProcess("generation[0]") as first, ReceiverProcess("generation[1]", is_staged=True) as second:
        request = request_of(transport, 2)
        with SenderProcess() as sender:
            connect(sender, [first, second], request)
            sender.call("halt_before", MIDDLE).result(WAIT_S)
            start = RefitStart(1, 1, TIMEOUT_S)
            updates = [receiver.call("update", start) for receiver in (first, second)]
            sender.call("send", start)
            assert sender.halted.wait(WAIT_S)
            sender.kill()
            for update in updates:
                error = failure_of(update, DEATH_S)
                assert (error.kind, error.root) == ("peer lost", 0)
        for receiver in (first, second):
            with pytest.raises(WeightSyncError, match="finish while the refit is broken"):
                receiver.call("finish").result(WAIT_S)
        with SenderProcess(seed=2) as successor:
            # The same channel: what the dead one left in shared memory is replaced.
            connect(successor, [first, second], request)
            refit(successor, [first, second], RefitStart(2, 1, TIMEOUT_S))
            successor.call("close").result(WAIT_S)


def test_a_reader_that_dies_mid_bucket_is_named_by_the_sender_and_the_rest_go_on(transport: TransportName) -> None:
    with SenderProcess() as sender, ReceiverProcess("generation[0]") as survivor:
        with ReceiverProcess("generation[1]", is_staged=True) as dying:
            connect(sender, [survivor, dying], request_of(transport, 2))
            dying.call("halt_before", MIDDLE).result(WAIT_S)
            start = RefitStart(1, 1, TIMEOUT_S)
            calls = [sender.call("send", start), survivor.call("update", start)]
            dying.call("update", start)
            assert dying.halted.wait(WAIT_S)
            dying.kill()
            error = failure_of(calls[0], DEATH_S)
            assert (error.kind, error.reader) == ("peer lost", 1)
            assert failure_of(calls[1], DEATH_S).kind in ("peer lost", "aborted")
        connect(sender, [survivor], request_of(transport, 1))
        refit(sender, [survivor], RefitStart(2, 1, TIMEOUT_S))
        sender.call("close").result(WAIT_S)


def test_a_reader_that_hangs_ends_the_refit_at_its_deadline_and_works_again_afterwards(
    transport: TransportName,
) -> None:
    with (
        SenderProcess() as sender,
        ReceiverProcess("generation[0]") as other,
        ReceiverProcess("generation[1]", is_staged=True) as hanging,
    ):
        connect(sender, [other, hanging], request_of(transport, 2))
        hanging.call("halt_before", MIDDLE).result(WAIT_S)
        start = RefitStart(1, 1, STOP_DEADLINE_S)
        send, update, stuck = (
            sender.call("send", start),
            other.call("update", start),
            hanging.call("update", start),
        )
        assert hanging.halted.wait(WAIT_S)
        hanging.stop()
        error = failure_of(send, STOP_DEADLINE_S + DEATH_S)
        assert error.kind in ("deadline", "peer lost") and error.reader == 1
        assert failure_of(update, STOP_DEADLINE_S + DEATH_S).kind in ("deadline", "peer lost", "aborted")
        hanging.resume()
        hanging.call("go_on").result(WAIT_S)
        assert isinstance(stuck.exception(WAIT_S), TransferError)
        connect(sender, [other, hanging], request_of(transport, 2))
        refit(sender, [other, hanging], RefitStart(2, 1, TIMEOUT_S))
        sender.call("close").result(WAIT_S)


def test_a_sender_that_hangs_ends_the_readers_at_the_deadline(transport: TransportName) -> None:
    with SenderProcess() as sender, ReceiverProcess("generation[0]") as receiver:
        connect(sender, [receiver], request_of(transport, 1))
        sender.call("halt_before", MIDDLE).result(WAIT_S)
        start = RefitStart(1, 1, STOP_DEADLINE_S)
        update, send = receiver.call("update", start), sender.call("send", start)
        assert sender.halted.wait(WAIT_S)
        sender.stop()
        error = failure_of(update, STOP_DEADLINE_S + DEATH_S)
        assert error.kind in ("deadline", "peer lost") and error.root == 0
        sender.resume()
        sender.call("go_on").result(WAIT_S)
        assert isinstance(send.exception(WAIT_S), TransferError)
        connect(sender, [receiver], request_of(transport, 1))
        refit(sender, [receiver], RefitStart(2, 1, TIMEOUT_S))
        sender.call("close").result(WAIT_S)


def test_an_abort_of_either_end_reaches_the_other_with_its_reason(transport: TransportName) -> None:
    with SenderProcess() as sender, ReceiverProcess("generation[0]", is_staged=True) as receiver:
        for epoch, (aborting, other) in enumerate(((sender, receiver), (receiver, sender)), 1):
            connect(sender, [receiver], request_of(transport, 1))
            receiver.halted.clear()
            receiver.call("halt_before", MIDDLE).result(WAIT_S)
            start = RefitStart(epoch, 1, TIMEOUT_S)
            calls = {receiver: receiver.call("update", start), sender: sender.call("send", start)}
            assert receiver.halted.wait(WAIT_S)
            aborting.call("abort", "somebody pulled the plug").result(WAIT_S)
            receiver.call("go_on").result(WAIT_S)
            for end in (aborting, other):
                error = failure_of(calls[end], DEATH_S)
                assert error.kind == "aborted" and "somebody pulled the plug" in str(error)
        connect(sender, [receiver], request_of(transport, 1))
        refit(sender, [receiver], RefitStart(3, 1, TIMEOUT_S))
        sender.call("close").result(WAIT_S)


def test_a_reader_that_comes_late_is_waited_for_and_one_that_never_comes_is_named(transport: TransportName) -> None:
    with (
        SenderProcess() as sender,
        ReceiverProcess("generation[0]") as early,
        ReceiverProcess("generation[1]") as late,
    ):
        info = sender.call("open", request_of(transport, 2)).result(WAIT_S)
        waiting = [sender.call("join"), early.call("init", info, 0)]
        early.call("usage").result(WAIT_S)  # it serves calls while it waits
        assert not waiting[0].done()
        late.call("init", info, 1).result(WAIT_S)
        for call in waiting:
            call.result(WAIT_S)
        refit(sender, [early, late], RefitStart(1, 1, TIMEOUT_S))
        info = sender.call("open", request_of(transport, 2, timeout_s=1.0)).result(WAIT_S)
        early_init = early.call("init", info, 0)
        error = failure_of(sender.call("join"), 1.0 + DEATH_S)
        assert error.kind == "deadline" and error.reader == 1
        assert isinstance(early_init.exception(DEATH_S), TransferError)
        # Too late: whoever it finds has given up.
        assert isinstance(late.call("init", info, 1).exception(1.0 + DEATH_S), TransferError)
        connect(sender, [early, late], request_of(transport, 2))
        refit(sender, [early, late], RefitStart(2, 1, TIMEOUT_S))
        sender.call("close").result(WAIT_S)


def test_what_the_ends_do_not_agree_on_is_refused_before_the_first_byte(transport: TransportName) -> None:
    with (
        SenderProcess() as sender,
        ReceiverProcess("generation[0]") as receiver,
        ReceiverProcess("generation[0]", dtype=torch.int32) as other_dtype,
    ):
        info = sender.call("open", request_of(transport, 1, timeout_s=5.0)).result(WAIT_S)
        before = receiver.call("held").result(WAIT_S)
        error = other_dtype.call("init", info, 0).exception(WAIT_S)
        assert "cannot take 'layers.0.weight' as float32: the generator's is torch.int32" in str(error)
        damaged = bytearray(info.plan)
        damaged[len(damaged) // 2] ^= 1
        error = receiver.call("init", replace(info, plan=bytes(damaged)), 0).exception(WAIT_S)
        assert isinstance(error, WeightSyncError), error
        assert receiver.call("held").result(WAIT_S) == before
        connect(sender, [receiver], request_of(transport, 1))
        refit(sender, [receiver], RefitStart(5, 1, TIMEOUT_S))
        for end, method in ((sender, "send"), (receiver, "update")):
            error = end.call(method, RefitStart(5, 2, TIMEOUT_S)).exception(WAIT_S)
            assert "epoch 5 of version 2 is old; 5 was the last" in str(error)
        error = receiver.call("finish").exception(WAIT_S)
        assert "finish while the refit is finished" in str(error)
        refit(sender, [receiver], RefitStart(6, 2, TIMEOUT_S))
        sender.call("close").result(WAIT_S)


def test_two_runs_of_one_host_do_not_disturb_each_other(transport: TransportName) -> None:
    with (
        SenderProcess(seed=1) as one,
        SenderProcess(seed=2) as two,
        ReceiverProcess("generation[0]") as of_one,
        ReceiverProcess("generation[0]", is_staged=True) as of_two,
    ):
        request = request_of(transport, 1)
        connect(one, [of_one], request)
        connect(two, [of_two], request_of(transport, 1))
        for epoch in (1, 2, 3):
            start = RefitStart(epoch, epoch, TIMEOUT_S)
            calls = [end.call("send", start) for end in (one, two)]
            calls += [end.call("update", start) for end in (of_one, of_two)]
            sent = [call.result(WAIT_S) for call in calls]
            assert sent[0] != sent[1]
            for receiver, expected in ((of_one, sent[0]), (of_two, sent[1])):
                assert receiver.call("finish").result(WAIT_S).digests == expected
                assert receiver.call("held").result(WAIT_S) == expected
        one.kill()
        refit(two, [of_two], RefitStart(4, 4, TIMEOUT_S))
        with SenderProcess() as cleaner:  # what the killed one left goes with the next owner of the name
            connect(cleaner, [of_one], request)
            refit(cleaner, [of_one], RefitStart(4, 4, TIMEOUT_S))
            cleaner.call("close").result(WAIT_S)
        two.call("close").result(WAIT_S)


def test_a_start_over_the_leftovers_of_a_kill_simply_works(transport: TransportName) -> None:
    channel = channel_name()
    request = request_of(transport, 1, channel)
    with SenderProcess() as killed:
        killed.call("open", request).result(WAIT_S)
        killed.kill()  # before anybody joined: its segment stays
    assert (f"{channel}-0" in segments()) == (transport == "shm")
    with SenderProcess(seed=2) as sender, ReceiverProcess("generation[0]") as receiver:
        connect(sender, [receiver], request)
        refit(sender, [receiver], RefitStart(1, 1, TIMEOUT_S))
        sender.kill()
        assert isinstance(receiver.call("update", RefitStart(2, 2, TIMEOUT_S)).exception(DEATH_S), TransferError)
        with SenderProcess(seed=3) as successor:
            connect(successor, [receiver], request)
            refit(successor, [receiver], RefitStart(3, 3, TIMEOUT_S))
            successor.call("close").result(WAIT_S)
