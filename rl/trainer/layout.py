"""Lay a micro-batch out as the tensors of one forward pass: padded, packed and shared-prefix rows alike.

A row holds segments one after the other. A token sees the earlier tokens of its own segment and all of its parent
segments, nothing else; its position id counts from the start of its sequence. A row of one segment is plain causal
attention, so a micro-batch of such rows needs neither mask nor position ids, however it is padded on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.core.batch import TrainBatch
from rl.trainer.planner import Row
from rl.trainer.siblings import Segment, grow_tree, needed_lengths

_NOWHERE = -1


@dataclass(frozen=True)
class Layout:
    """R rows of S positions; C counted tokens, predicted as K different (place, target) pairs.

    Attributes:
        tokens: [R, S] int64.
        position_ids: [R, S] int64, or None where every row counts from 0.
        mask: [R, 1, S, S] bool, whether a position (third axis) sees another (fourth); None for plain causal rows.
        places: [K] int64, ascending indices into the flattened rows: where each pair is predicted. Where siblings part
            one place has several pairs; its logits are computed for each, which is cheaper than a copy of all logits.
        targets: [K] int64, the token to predict.
        pairs: [C] int64, the pair of each counted token, in the order of the batch.
    """

    tokens: Tensor
    position_ids: Tensor | None
    mask: Tensor | None
    places: Tensor
    targets: Tensor
    pairs: Tensor

    def to(self, device: torch.device) -> "Layout":
        """Return it with all that the model needs on `device`; `pairs` stays where it is."""
        position_ids, mask = (t if t is None else t.to(device) for t in (self.position_ids, self.mask))
        tokens, places, targets = (t.to(device) for t in (self.tokens, self.places, self.targets))
        return Layout(tokens, position_ids, mask, places, targets, self.pairs)


def lay_out(batch: TrainBatch, rows: Sequence[Row], counted: Tensor, width: int) -> Layout:
    """Return the tensors of one pass.

    Args:
        batch: The micro-batch; the units of `rows` number its sequences.
        rows: Sequences without a counted token may be left out of them.
        counted: [T] bool, the tokens to predict; never the first one of a sequence.
        width: S.

    Raises:
        ValueError: a row is longer than `width`, or a counted token is in no row.
    """
    lengths = needed_lengths(batch, counted)
    trees = [_segments(batch, row, lengths) for row in rows]
    place_of = _place_tokens(batch, trees, width)
    laid_out = place_of >= 0
    tokens = torch.zeros(len(rows) * width, dtype=torch.int64)
    tokens[place_of[laid_out]] = batch.tokens[laid_out]
    is_plain = all(len(segments) <= 1 for segments in trees)
    position_ids = mask = None
    if not is_plain:
        within = torch.arange(batch.num_tokens) - batch.offsets[:-1][batch.sequence_ids]
        position_ids = torch.zeros_like(tokens)
        position_ids[place_of[laid_out]] = within[laid_out]
        position_ids = position_ids.view(len(rows), width)
        mask = torch.stack([visible(segments, width) for segments in trees]).unsqueeze(1)
    targets = batch.tokens[counted]
    predicting = place_of[counted.nonzero().squeeze(1) - 1]
    if bool((predicting == _NOWHERE).any()):
        raise ValueError("a counted token is in no row of the micro-batch")
    vocabulary = int(targets.max()) + 1
    keys, pairs = torch.unique(predicting * vocabulary + targets, return_inverse=True)
    return Layout(tokens.view(len(rows), width), position_ids, mask, keys // vocabulary, keys % vocabulary, pairs)


def _segments(batch: TrainBatch, row: Row, lengths: list[int]) -> list[Segment]:
    """Return the segments of all units of a row, one tree after the other."""
    segments: list[Segment] = []
    for unit in row:
        starts = [int(batch.offsets[number]) for number in unit.sequences]
        siblings = [
            (number, batch.tokens[start : start + lengths[number]].tolist())
            for number, start in zip(unit.sequences, starts, strict=True)
        ]
        shift = len(segments)
        for segment in grow_tree(siblings):
            parent = segment.parent if segment.parent < 0 else segment.parent + shift
            segments.append(Segment(segment.members, segment.start, segment.end, parent))
    return segments


def _place_tokens(batch: TrainBatch, trees: list[list[Segment]], width: int) -> Tensor:
    """Return where each token of the batch stands in the flattened rows, [T] int64; -1 for tokens nobody needs."""
    place_of = torch.full((batch.num_tokens,), _NOWHERE)
    offsets = batch.offsets.tolist()
    for row, segments in enumerate(trees):
        place = row * width
        for segment in segments:
            size = segment.end - segment.start
            for number in segment.members:
                start = offsets[number] + segment.start
                place_of[start : start + size] = torch.arange(place, place + size)
            place += size
        if place > (row + 1) * width:
            raise ValueError(f"a row of {place - row * width} positions does not fit in a width of {width}")
    return place_of


def visible(segments: Sequence[Segment], width: int) -> Tensor:
    """Return which positions each position of a row sees, [S, S] bool; padding sees padding before it."""
    visible = torch.zeros(width, width, dtype=torch.bool)
    ends: list[int] = []
    place = 0
    for segment in segments:
        end = place + segment.end - segment.start
        if segment.parent >= 0:
            visible[place:end] = visible[ends[segment.parent] - 1]
        visible[place:end, place:end] = torch.ones(end - place, end - place, dtype=torch.bool).tril()
        ends.append(end)
        place = end
    visible[place:, place:] = torch.ones(width - place, width - place, dtype=torch.bool).tril()
    return visible
