"""What k samples of one prompt would achieve, estimated without bias from n >= k of them. Pure; exact integers.

pass_at_k(4, 1, 2)                                        # 0.5
consensus_at_k([Vote("A", True), Vote("A", True), Vote("B", False)], 3)     # 1.0
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Vote:
    """One sample as a voter: its answer, None where it has none and does not vote, and whether it was judged right."""

    answer: str | None
    is_correct: bool


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, hold a right one.

    pass@k = 1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, equation 1)

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= correct <= n.
    """
    _check(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} samples cannot be right")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def consensus_at_k(votes: Sequence[Vote], k: int) -> float:
    """Return the share of all k-subsets of the samples whose most frequent answer is right.

    Of equally frequent answers the one that comes first in the subset wins, in the order of the samples. A sample
    without an answer takes a place of the subset and does not vote; a subset without votes is wrong. Samples with the
    same answer that were judged differently (a judge may look at more than the answer) are two answers.

    The subsets are counted, not enumerated. For a right answer w that wins with m votes, of which the first is sample
    f: the other m - 1 votes are among the later samples of w; any other answer has less than m votes, or m votes that
    all come after f; silent samples are free. So the count is

        sum over w, f, m of  C(later(w, f), m - 1) * [x^(k - m)] (1 + x)^silent * prod over a != w of P_a(x),
        P_a(x) = sum for t < m of C(size(a), t) x^t  +  C(later(a, f), m) x^m

    which takes O(n^3 k) integer operations at most.

    Args:
        votes: All samples of one prompt, in order.
        k: Size of the subsets.

    Raises:
        ValueError: not 1 <= k <= n.
    """
    _check(len(votes), k)
    positions: dict[Vote, list[int]] = defaultdict(list)
    for position, vote in enumerate(votes):
        if vote.answer is not None:
            positions[vote].append(position)
    silent = sum(vote.answer is None for vote in votes)
    winning = 0
    for winner, own in positions.items():
        others = [places for answer, places in positions.items() if answer != winner]
        if winner.is_correct:
            winning += _subsets_won_by(own, others, silent, k)
    return winning / comb(len(votes), k)


def _subsets_won_by(own: Sequence[int], others: Sequence[Sequence[int]], silent: int, k: int) -> int:
    """Count the k-subsets in which the answer at the positions `own` wins."""
    count = 0
    for index, first in enumerate(own):
        later = len(own) - index - 1
        for votes in range(1, min(later + 1, k) + 1):
            ways = [comb(silent, chosen) for chosen in range(k - votes + 1)]
            for places in others:
                ways = _times(ways, _losing(places, first, votes))
            count += comb(later, votes - 1) * ways[k - votes]
    return count


def _losing(places: Sequence[int], first: int, votes: int) -> list[int]:
    """P_a: ways to choose t samples of an answer that lose against `votes` votes that begin at `first`, by t."""
    fewer = [comb(len(places), chosen) for chosen in range(min(votes - 1, len(places)) + 1)]
    after = sum(place > first for place in places)
    return [*fewer, comb(after, votes)] if after >= votes else fewer


def _times(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Multiply two polynomials and keep the degree of `left`."""
    product = [0] * len(left)
    for degree, factor in enumerate(right[: len(left)]):
        for index in range(len(left) - degree):
            product[index + degree] += factor * left[index]
    return product


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be at least 1 and at most the number of samples, {n}")
