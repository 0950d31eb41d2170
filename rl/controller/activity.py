"""When something was under way, as intervals on one clock, and how long two such things overlapped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl.core.clock import Clock

Interval = tuple[float, float]


class Activity:
    """Records the intervals in which at least one span is open."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open = 0
        self._since = 0.0
        self._intervals: list[Interval] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Be under way for the `with` block; spans may overlap."""
        if self._open == 0:
            self._since = self._clock.now()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if self._open == 0:
                self._intervals.append((self._since, self._clock.now()))

    def drain(self) -> list[Interval]:
        """Return the disjoint intervals until now, in order; an open one is cut here and goes on."""
        intervals, self._intervals = self._intervals, []
        if self._open > 0:
            now = self._clock.now()
            intervals.append((self._since, now))
            self._since = now
        return intervals


def overlap_s(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Seconds that lie in both lists; each list is sorted and disjoint."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total
