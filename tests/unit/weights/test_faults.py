"""Errors of a transfer say what, who and where, also after a trip to another process."""

import pickle

import pytest

from rl.core.errors import WeightSyncError
from rl.weights.faults import FAULT_KINDS, FIRST_READER, NO_BUCKET, NO_RANK, FaultKind, TransferError


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_it_survives_pickling(kind: FaultKind) -> None:
    error = pickle.loads(pickle.dumps(TransferError("gone", kind, FIRST_READER + 3, 17)))
    assert isinstance(error, WeightSyncError)
    assert (str(error), error.kind, error.rank, error.bucket) == ("gone", kind, FIRST_READER + 3, 17)


@pytest.mark.parametrize(
    ("rank", "root", "reader"), [(0, 0, None), (7, 7, None), (FIRST_READER + 2, None, 2), (NO_RANK, None, None)]
)
def test_a_rank_is_a_root_or_a_reader_or_nobody(rank: int, root: int | None, reader: int | None) -> None:
    error = TransferError("late", "deadline", rank)
    assert (error.root, error.reader, error.bucket) == (root, reader, NO_BUCKET)
