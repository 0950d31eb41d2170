"""Distribute indexed items of known size over bins and ranks: deterministic, pure integer arithmetic.

`first_fit_decreasing` needs few bins (within 11/9 of the optimum), `balance` makes a given number of bins even
(longest processing time first: the largest and the smallest differ by no more than one item). What an item is, and
what a bin becomes, is the caller's business.
"""

from collections.abc import Sequence
from typing import TypeVar

Bins = list[list[int]]
Item = TypeVar("Item")


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Return the indices of `sizes` in bins whose sums stay within `capacity`.

    Largest first (of equal ones the later first), each into the first bin with room.

    Raises:
        ValueError: an item alone is too large.
    """
    if any(size > capacity for size in sizes):
        raise ValueError(f"an item of size {max(sizes)} fits in no bin of capacity {capacity}")
    bins: Bins = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], -i)):
        place = next((i for i, left in enumerate(room) if left >= sizes[index]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= sizes[index]
    return bins


def balance(sizes: Sequence[int], num_bins: int) -> Bins:
    """Return the indices of `sizes` in `num_bins` bins of sums as even as possible, some empty if items are few.

    Largest first (of equal ones the earlier first), each into the bin with the smallest sum.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    sums = [0] * num_bins
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = min(range(num_bins), key=lambda i: (sums[i], len(bins[i]), i))
        bins[place].append(index)
        sums[place] += sizes[index]
    return bins


def split_bins(bins: Sequence[Sequence[Item]], num_bins: int) -> list[list[Item]]:
    """Return the bins, made `num_bins` by giving each new one the last item of the one with most items.

    Where every bin is down to one item, new ones stay empty.
    """
    result = [list(items) for items in bins]
    largest_first = sorted(range(len(result)), key=lambda i: -len(result[i]))
    while len(result) < num_bins:
        donor = max(largest_first, key=lambda i: len(result[i]), default=None)
        can_give = donor is not None and len(result[donor]) > 1
        result.append([result[donor].pop()] if donor is not None and can_give else [])
    return result
