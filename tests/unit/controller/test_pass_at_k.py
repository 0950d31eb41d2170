"""Tests of rl.controller.pass_at_k: the published numbers, and everything else by enumeration."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.controller.pass_at_k import Vote, consensus_at_k, pass_at_k

RIGHT, WRONG, SILENT = Vote("A", True), Vote("B", False), Vote(None, False)


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"), [(4, 1, 2, 0.5), (10, 3, 5, 0.9166667), (5, 0, 1, 0.0), (5, 5, 3, 1.0)]
)
def test_pass_at_k_has_the_published_values(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=5e-8)


@given(
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case: tuple[list[bool], int]) -> None:
    samples, k = case
    subsets = list(combinations(samples, k))
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("votes", "k", "expected"),
    [
        ([RIGHT, RIGHT, WRONG], 3, 1.0),
        ([RIGHT, RIGHT, WRONG], 1, 2 / 3),
        ([RIGHT, WRONG], 2, 1.0),
        ([WRONG, RIGHT], 2, 0.0),
        ([SILENT, SILENT, RIGHT], 3, 1.0),
        ([SILENT, SILENT], 2, 0.0),
        ([WRONG, SILENT, SILENT], 3, 0.0),
        ([Vote("A", True), Vote("A", False), Vote("A", False)], 3, 0.0),
    ],
)
def test_cons_at_k_has_the_published_values(votes: list[Vote], k: int, expected: float) -> None:
    assert consensus_at_k(votes, k) == pytest.approx(expected)


def winner_is_right(subset: Sequence[Vote]) -> bool:
    counts = Counter(vote for vote in subset if vote.answer is not None)
    best = max(counts.values(), default=0)
    return next((vote.is_correct for vote in subset if vote.answer is not None and counts[vote] == best), False)


ANSWERS = st.sampled_from(
    [Vote("a", True), Vote("b", False), Vote("c", False), Vote("d", True), Vote("a", False), SILENT]
)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.lists(ANSWERS, min_size=n, max_size=n), st.integers(1, n))))
def test_cons_at_k_is_the_share_of_subsets_whose_majority_is_right(case: tuple[list[Vote], int]) -> None:
    votes, k = case
    subsets = [winner_is_right(subset) for subset in combinations(votes, k)]
    assert consensus_at_k(votes, k) == float(Fraction(sum(subsets), len(subsets)))


def test_many_samples_take_no_enumeration() -> None:
    votes = [Vote(str(index % 8), index % 8 == 0) for index in range(64)]
    assert 0.0 < consensus_at_k(votes, 32) < 1.0


@pytest.mark.parametrize(("n", "k"), [(3, 0), (3, 4), (0, 1)])
def test_k_lies_between_one_and_the_number_of_samples(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}"):
        pass_at_k(n, 0, k)
    with pytest.raises(ValueError, match=f"k={k}"):
        consensus_at_k([RIGHT] * n, k)
