"""Bins hold what they may, are even where they should be, and nothing gets lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.ops.packing import balance, first_fit_decreasing, split_bins

SIZES = st.lists(st.integers(1, 50), max_size=40)


@pytest.mark.parametrize(
    ("sizes", "capacity", "expected"),
    [
        ([4, 1, 3, 2, 1, 3, 4, 5], 5, [[7], [6, 4], [0, 1], [5, 3], [2]]),
        ([4, 1, 3, 2, 1, 3, 4, 5], 8, [[7, 5], [6, 0], [2, 3, 4, 1]]),
        ([6, 5, 4, 3, 3, 2, 2, 1], 10, [[0, 2], [1, 4, 6], [3, 5, 7]]),
        ([], 5, []),
    ],
)
def test_first_fit_decreasing_gives_the_known_bins(sizes: list[int], capacity: int, expected: list[list[int]]) -> None:
    assert first_fit_decreasing(sizes, capacity) == expected


@pytest.mark.parametrize(
    ("sizes", "num_bins", "expected"),
    [
        ([2, 2, 2, 2], 2, [[3, 2, 1], [0]]),
        ([5, 4, 3, 2, 1], 4, [[0, 2], [1], [4], [3]]),
        ([5], 3, [[0], [], []]),
    ],
)
def test_new_bins_take_the_last_item_of_the_fullest(sizes: list[int], num_bins: int, expected: list[list[int]]) -> None:
    assert split_bins(first_fit_decreasing(sizes, 8), num_bins) == expected


def test_an_item_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="size 9 fits in no bin of capacity 8"):
        first_fit_decreasing([3, 9], 8)


@given(sizes=SIZES, capacity=st.integers(50, 120))
def test_packed_bins_hold_every_item_once_within_capacity_and_are_few(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(sizes)))
    assert all(bin_ and sum(sizes[index] for index in bin_) <= capacity for bin_ in bins)
    assert len(bins) <= 11 / 9 * -(-sum(sizes) // capacity) * 2 + 1
    assert bins == first_fit_decreasing(sizes, capacity)


@given(sizes=SIZES, num_bins=st.integers(1, 6))
def test_balanced_bins_differ_by_no_more_than_the_largest_item(sizes: list[int], num_bins: int) -> None:
    bins = balance(sizes, num_bins)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(sizes)))
    sums = [sum(sizes[index] for index in bin_) for bin_ in bins]
    assert len(sums) == num_bins
    assert max(sums) - min(sums) <= max(sizes, default=0)
    assert bins == balance(sizes, num_bins)
