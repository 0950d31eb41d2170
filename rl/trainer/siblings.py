"""Which sequences are computed together: a group's prompt once for all its siblings, where that pays.

Siblings form a tree: what they begin with alike is its trunk, and they branch where their tokens differ. In a causal
model a hidden state depends on the tokens before it alone, so a shared trunk gives every sibling the states that it
would have alone, and its gradient is the sum of theirs. Nothing here runs a model.

Only positions that predict a counted token are needed, so a sequence ends, for the model, before its last counted one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rl.core.batch import TrainBatch

# A tree attends with a dense mask, plain rows causally: half of the work. Attention to this many positions costs about
# as much as all else that a layer does for a token (six times the hidden size, of a small model).
_ATTENTION_EQUALS_REST = 4096


@dataclass(frozen=True)
class Unit:
    """Sequences that share a computation.

    Attributes:
        sequences: Their numbers in the batch.
        num_positions: Positions that the model computes for them.
    """

    sequences: tuple[int, ...]
    num_positions: int


@dataclass(frozen=True)
class Segment:
    """A piece of a tree: tokens start..end of each of its members, computed once.

    Attributes:
        members: Numbers of the sequences that run through it.
        start: First token within the sequence.
        end: One past the last.
        parent: Index of the segment before it in the tree's list, or -1.
    """

    members: tuple[int, ...]
    start: int
    end: int
    parent: int


def needed_lengths(batch: TrainBatch, counted: Tensor) -> list[int]:
    """Return how many leading tokens of each sequence the model must see to predict the `counted` ones ([T] bool)."""
    place = torch.arange(batch.num_tokens) - batch.offsets[:-1][batch.sequence_ids]
    last = torch.zeros(batch.num_sequences, dtype=torch.int64)
    last = last.scatter_reduce(0, batch.sequence_ids, place * counted, "amax")
    return [int(length) for length in last.tolist()]


def grow_tree(sequences: Sequence[tuple[int, Sequence[int]]]) -> list[Segment]:
    """Return the segments of one tree, parents first.

    Args:
        sequences: (number, tokens) of each sibling; none empty.
    """
    segments: list[Segment] = []
    # In lexicographic order what all have in common is what the first and the last have in common.
    waiting = [(sorted(sequences, key=lambda s: (list(s[1]), s[0])), 0, -1)]
    while waiting:
        members, start, parent = waiting.pop()
        end = _common_length(members[0][1], members[-1][1], start)
        if end > start:
            segments.append(Segment(tuple(number for number, _ in members), start, end, parent))
            parent = len(segments) - 1
        longer = [member for member in members if len(member[1]) > end]
        branches = [list(branch) for _, branch in groupby(longer, key=lambda member: member[1][end])]
        waiting.extend((branch, end, parent) for branch in reversed(branches))
    return segments


def find_units(batch: TrainBatch, counted: Tensor, *, share: bool, always: bool, max_positions: int) -> list[Unit]:
    """Return the units of all sequences that have a counted token.

    Args:
        batch: Of any size.
        counted: [T] bool, the tokens to predict.
        share: Whether siblings may share their prefixes.
        always: Share wherever siblings have a prefix in common; otherwise where it is estimated to save time.
        max_positions: The largest tree; beyond it, a group is split and the prefix is computed again.
    """
    lengths = needed_lengths(batch, counted)
    numbers = [number for number in range(batch.num_sequences) if lengths[number]]
    if not share:
        return [Unit((number,), lengths[number]) for number in numbers]
    tokens, offsets, groups = batch.tokens.tolist(), batch.offsets.tolist(), batch.group_ids.tolist()
    siblings: dict[int, list[tuple[int, Sequence[int]]]] = {}
    for number in numbers:
        start = offsets[number]
        siblings.setdefault(groups[number], []).append((number, tokens[start : start + lengths[number]]))
    units: list[Unit] = []
    for group in siblings.values():
        units += _divide(sorted(group, key=lambda s: (list(s[1]), s[0])), always, max_positions)
    return units


def _divide(group: list[tuple[int, Sequence[int]]], always: bool, max_positions: int) -> list[Unit]:
    """Make one tree of the group, or of each half where the whole is too large or does not pay."""
    whole = _unit(group)
    if len(group) == 1:
        return [whole]
    middle = len(group) // 2
    if whole.num_positions <= max_positions and always and _begin_alike(group):
        return [whole]
    halves = _divide(group[:middle], always, max_positions) + _divide(group[middle:], always, max_positions)
    pays = not always and _cost(whole) < sum(_cost(half) for half in halves)
    return [whole] if pays and whole.num_positions <= max_positions else halves


def _begin_alike(group: list[tuple[int, Sequence[int]]]) -> bool:
    return _common_length(group[0][1], group[-1][1], 0) > 0


def _unit(group: list[tuple[int, Sequence[int]]]) -> Unit:
    positions = sum(segment.end - segment.start for segment in grow_tree(group))
    return Unit(tuple(number for number, _ in group), positions)


def _cost(unit: Unit) -> float:
    attended = unit.num_positions if len(unit.sequences) > 1 else unit.num_positions / 2
    return unit.num_positions * (1 + attended / _ATTENTION_EQUALS_REST)


def _common_length(left: Sequence[int], right: Sequence[int], start: int) -> int:
    """Return where two sequences part that are alike up to `start`; by halving, because slices compare fast."""
    low, high = start, min(len(left), len(right))
    if left[low:high] == right[low:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
