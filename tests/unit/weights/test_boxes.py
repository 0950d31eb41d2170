"""Boxes are where torch.distributed puts the parts of a tensor, and what has no box on every rank is refused."""

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from rl.core.errors import WeightSyncError
from rl.weights.boxes import Box, box_of, boxes_along, chunks, read_boxes, sent_boxes


def test_chunks_are_those_of_torch() -> None:
    for extent in range(12):
        for size in range(1, 6):
            parts = list(torch.empty(extent).chunk(size)) if extent else []
            expected = [part.numel() for part in parts] + [0] * (size - len(parts))
            assert list(chunks(extent, size)) == expected


@pytest.mark.parametrize("shape", [(12, 8), (7, 5, 3), (1, 2), (0, 4), (24, 1)])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 3), (3, 1, 2)])
def test_boxes_are_those_of_torch_for_every_mix_of_shards_and_copies(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=len(mesh_shape)):
        for coordinate in itertools.product(*map(range, mesh_shape)):
            box = box_of(shape, mesh_shape, coordinate, placements)
            extents, start = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
            assert box.shape == extents
            assert box.numel == 0 or box.start == start


@pytest.mark.parametrize(("rows", "mesh_shape"), [(12, (2, 2)), (24, (4, 2)), (16, (2, 4))])
def test_what_tensor_parallelism_cut_before_is_a_box_too(rows: int, mesh_shape: tuple[int, int]) -> None:
    placements: tuple[Any, ...] = (_StridedShard(0, split_factor=mesh_shape[1]), Shard(0))
    coordinates = list(itertools.product(*map(range, mesh_shape)))
    boxes = [box_of((rows, 3), mesh_shape, coordinate, placements) for coordinate in coordinates]
    for box, coordinate in zip(boxes, coordinates, strict=True):
        expected = _compute_local_shape_and_global_offset((rows, 3), mesh_shape, list(coordinate), placements)
        assert (box.shape, box.start) == expected
    assert sorted(box.start[0] for box in boxes) == list(range(0, rows, rows // len(boxes)))


def test_rows_from_several_places_and_partial_sums_are_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"the rank at \(0, 0\) has rows of its \[8, 3\] from several places"):
        box_of((8, 3), (2, 2), (0, 0), (_StridedShard(0, split_factor=2), Replicate()))
    with pytest.raises(WeightSyncError, match=r"it is spread by P.*; a refit carries shards and copies"):
        box_of((8, 3), (2, 2), (0, 0), (Partial(), Replicate()))


def test_slices_along_an_axis_follow_each_other() -> None:
    assert boxes_along((2, 5), 1, (3, 0, 2)) == (Box((0, 0), (2, 3)), Box((0, 3), (2, 0)), Box((0, 3), (2, 2)))


def test_a_copy_and_nothing_are_not_sent() -> None:
    rows = [Box((0, 0), (2, 3)), Box((2, 0), (0, 3)), Box((2, 0), (1, 3))]
    assert sent_boxes([*rows, *rows]) == (rows[0], None, rows[2], None, None, None)


def test_boxes_survive_being_written_as_numbers() -> None:
    boxes = [Box((), ()), Box((1, 2), (3, 4)), Box((5,), (0,))]
    numbers = [number for box in boxes for number in (*box.start, *box.shape)]
    assert read_boxes(numbers, [0, 2, 1]) == boxes
    assert str(boxes[1]) == "[3, 4] at [1, 2]"
