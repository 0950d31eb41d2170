"""Slices: each receiver's boxes are cut out of the whole, and boxes that do not fit are named."""

import pytest
import torch

from rl.core.errors import WeightSyncError
from rl.weights.layout import SlicedSource
from rl.weights.source import LocalSource
from rl.weights.transport import StoredTensor

TENSORS = {"up": torch.arange(24.0).view(4, 6), "norm": torch.arange(6.0), "scale": torch.tensor(2.0)}


def sliced(*stored: StoredTensor) -> SlicedSource:
    return SlicedSource(LocalSource(lambda: TENSORS), stored)


def test_boxes_of_any_axis_are_cut_and_unnamed_tensors_stay_home() -> None:
    source = sliced(StoredTensor("scale", (), ()), StoredTensor("up", (1, 2), (2, 3)))
    manifest = source.manifest()
    assert [(spec.name, spec.shape) for spec in manifest] == [("up", (2, 3)), ("scale", ())]
    source.begin(1.0)
    assert not source.holds_tensors and not source.is_sharded and source.agree(True)
    box, scale = source.tensors([0, 1])
    assert box.is_contiguous() and torch.equal(box, TENSORS["up"][1:3, 2:5])
    assert torch.equal(scale, TENSORS["scale"])
    source.end()


def test_whole_tensors_are_not_copied() -> None:
    source = sliced(StoredTensor("up", (0, 0), (4, 6)), StoredTensor("norm", (0,), (6,)))
    source.manifest()
    source.begin(1.0)
    assert source.holds_tensors
    assert source.tensors([0])[0].data_ptr() == TENSORS["up"].data_ptr()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (StoredTensor("down", (0,), (1,)), "'down', which the trainer does not have"),
        (StoredTensor("up", (3, 0), (2, 6)), r"box of shape \[2, 6\] at \[3, 0\] of 'up', whose shape is \[4, 6\]"),
        (StoredTensor("norm", (0, 0), (1, 1)), r"of 'norm', whose shape is \[6\]"),
        (StoredTensor("norm", (-1,), (2,)), r"at \[-1\] of 'norm'"),
    ],
)
def test_a_box_that_does_not_fit_is_named(stored: StoredTensor, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        sliced(stored).manifest()
