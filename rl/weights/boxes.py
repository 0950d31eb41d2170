"""Which box of a tensor each rank of a trainer has.

It says where parts lie and moves none. What torch.distributed spreads over a mesh of several axes is a box on every
rank, as long as no axis is cut so that a rank gets rows from several places; that is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rl.core.errors import WeightSyncError


@dataclass(frozen=True)
class Box:
    """A part of a tensor, by axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """For messages."""
        return f"{list(self.shape)} at {list(self.start)}"

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def chunks(extent: int, size: int) -> tuple[int, ...]:
    """How torch.distributed spreads an axis over ranks: equal parts rounded up, the last ones shorter or empty."""
    return tuple(len(_rows_of(extent, size, rank)) for rank in range(size))


def boxes_along(shape: Sequence[int], dim: int, extents: Sequence[int]) -> tuple[Box, ...]:
    """Return the box of each rank where one axis is cut into `extents`, in rank order.

    Args:
        shape: Of the whole tensor.
        dim: The axis.
        extents: Of each rank.
    """
    boxes = []
    for rank, extent in enumerate(extents):
        start, part = [0] * len(shape), list(shape)
        start[dim], part[dim] = sum(extents[:rank]), extent
        boxes.append(Box(tuple(start), tuple(part)))
    return tuple(boxes)


def box_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Sequence[Any]
) -> Box:
    """Return the box of one rank of a mesh.

    Args:
        shape: Of the whole tensor.
        mesh_shape: Of the mesh.
        coordinate: Of the rank in it.
        placements: How each axis of the mesh spreads the tensor.

    Raises:
        WeightSyncError: a kind of placement that is no box on every rank.
    """
    axes = [[range(extent)] for extent in shape]
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise WeightSyncError(f"it is spread by {placement}; a refit carries shards and copies")
        axis = placement.dim % len(shape)
        axes[axis] = _part(axes[axis], size, index, _split_factor(placement))
    if any(len(pieces) != 1 for pieces in axes):
        raise WeightSyncError(
            f"the rank at {coordinate} has rows of its {list(shape)} from several places, as {tuple(placements)} "
            f"spread it over {mesh_shape} ranks; a refit carries one box of each rank"
        )
    found = [pieces[0] for pieces in axes]
    return Box(tuple(piece.start for piece in found), tuple(len(piece) for piece in found))


def read_boxes(numbers: Sequence[int], ranks: Sequence[int]) -> list[Box]:
    """Read boxes that were written one after the other, start and shape of each.

    Args:
        numbers: As they were written.
        ranks: How many axes each box has.
    """
    boxes, begin = [], 0
    for rank in ranks:
        start, shape = numbers[begin : begin + rank], numbers[begin + rank : begin + 2 * rank]
        boxes.append(Box(tuple(start), tuple(shape)))
        begin += 2 * rank
    return boxes


def sent_boxes(boxes: Sequence[Box]) -> tuple[Box | None, ...]:
    """Return what each rank sends; None where it has nothing, or the same as a rank before it."""
    seen: set[Box] = set()
    found: list[Box | None] = []
    for box in boxes:
        found.append(box if box.numel and box not in seen else None)
        seen.add(box)
    return tuple(found)


def _rows_of(extent: int, size: int, index: int) -> range:
    step = -(-extent // size)
    return range(min(step * index, extent), min(step * (index + 1), extent))


def _split_factor(placement: Shard | _StridedShard) -> int:
    """Parts into which a later axis of the mesh had cut before; what FSDP2 does to tensors that are cut already."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _part(pieces: list[range], size: int, index: int, split_factor: int) -> list[range]:
    """The rows of rank `index` of `size` of these rows, cut into `split_factor` parts before."""
    cut = [part for number in range(split_factor) for part in _chunk(_chunk(pieces, split_factor, number), size, index)]
    joined = cut[:1]
    for piece in cut[1:]:
        if piece.start == joined[-1].stop or not len(joined[-1]):
            joined[-1] = range(joined[-1].start if len(joined[-1]) else piece.start, piece.stop)
        elif len(piece):
            joined.append(piece)
    return joined


def _chunk(pieces: list[range], size: int, index: int) -> list[range]:
    """One of `size` equal parts; one empty range where nothing is left."""
    rows = _rows_of(sum(map(len, pieces)), size, index)
    first, left = rows.start, len(rows)
    found = []
    for piece in pieces:
        taken = piece[first : first + left] if first < len(piece) else piece[:0]
        if taken:
            found.append(taken)
        first, left = max(0, first - len(piece)), left - len(taken)
    return found or [range(0)]
