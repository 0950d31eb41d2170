"""Assignments of truth values in which every pair of values occurs, where a rule allows it."""

import itertools
from collections.abc import Callable, Mapping, Sequence

Assignment = dict[str, bool]
Pair = tuple[tuple[str, bool], tuple[str, bool]]


def cover_pairs(
    names: Sequence[str], defaults: Mapping[str, bool], accepts: Callable[[Assignment], bool]
) -> tuple[list[Assignment], list[Pair]]:
    """Return accepted assignments, and the pairs that are refused where everything else has its default.

    Each pair of values of two names is in one of the two. Deterministic and greedy: an assignment begins with a pair
    that is not covered yet, and takes further values that cover more as long as it stays accepted.
    """
    left = dict.fromkeys(
        ((first, a), (second, b))
        for first, second in itertools.combinations(names, 2)
        for a, b in itertools.product((True, False), repeat=2)
    )
    assignments: list[Assignment] = []
    refused: list[Pair] = []
    while left:
        pair = next(iter(left))
        chosen = {**defaults, **dict(pair)}
        if not accepts(chosen):
            refused.append(pair)
            del left[pair]
            continue
        fixed = {name for name, _ in pair}
        for name in names:
            other = {**chosen, name: not chosen[name]}
            if name not in fixed and _count(other, left) > _count(chosen, left) and accepts(other):
                chosen = other
        for covered in itertools.combinations([(name, chosen[name]) for name in names], 2):
            left.pop(covered, None)
        assignments.append(chosen)
    return assignments, refused


def _count(assignment: Assignment, left: Mapping[Pair, None]) -> int:
    return sum(assignment[first] == a and assignment[second] == b for (first, a), (second, b) in left)
