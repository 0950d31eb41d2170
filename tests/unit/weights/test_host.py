"""The shared-memory ring: two mappings of one segment, its name, its end."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rl.core.errors import WeightSyncError
from rl.core.reaper import SHARED_MEMORY
from rl.weights.host import SharedRing


@pytest.fixture
def channel() -> Iterator[str]:
    name = f"tdm-test-{secrets.token_hex(6)}"
    yield name
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_what_one_end_writes_the_other_reads(channel: str) -> None:
    sender = SharedRing.create(channel, 128, 2)
    receiver = SharedRing.attach(channel, 128, 2)
    sender.slot(1).fill_(7)
    sender.slot(2).fill_(9)
    assert receiver.slot(0).tolist() == [9] * 128
    assert receiver.slot(3).tolist() == [7] * 128
    receiver.close()
    sender.close()


def test_the_segment_is_named_as_told_and_removed_by_its_owner_only(channel: str) -> None:
    sender = SharedRing.create(channel, 64, 2)
    SharedRing.attach(channel, 64, 2).close()
    assert (SHARED_MEMORY / channel).stat().st_size == 128
    sender.close()
    sender.close()
    assert not (SHARED_MEMORY / channel).exists()


def test_a_receiver_that_ends_does_not_remove_the_segment(channel: str) -> None:
    sender = SharedRing.create(channel, 64, 2)
    code = f"from rl.weights.host import SharedRing; SharedRing.attach({channel!r}, 64, 2).slot(0).fill_(3)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert (SHARED_MEMORY / channel).exists()
    assert sender.slot(0).tolist() == [3] * 64
    sender.close()


def test_a_name_that_is_taken_is_refused(channel: str) -> None:
    sender = SharedRing.create(channel, 64, 2)
    with pytest.raises(WeightSyncError, match="exists"):
        SharedRing.create(channel, 64, 2)
    sender.close()


def test_a_missing_or_differing_segment_is_refused(channel: str) -> None:
    with pytest.raises(WeightSyncError, match="no shared memory segment"):
        SharedRing.attach(channel, 64, 2)
    sender = SharedRing.create(channel, 64, 2)
    with pytest.raises(WeightSyncError, match="has 128 bytes, the plan needs 256"):
        SharedRing.attach(channel, 128, 2)
    sender.close()


def test_too_large_a_ring_names_the_setting_and_leaves_nothing(channel: str) -> None:
    with pytest.raises(WeightSyncError, match="bucket_mib"):
        SharedRing.create(channel, 1 << 50, 2)
    assert not (SHARED_MEMORY / channel).exists()


def test_a_closed_ring_cannot_be_used(channel: str) -> None:
    ring = SharedRing.create(channel, 64, 2)
    ring.close()
    with pytest.raises(WeightSyncError, match="is closed"):
        ring.slot(0)
