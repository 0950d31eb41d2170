"""Whether generation moves: what all rollout managers of a run have under way, and what has ended.

One Movement is shared by the managers of a run, so that whoever watches it sees the groups of a validation too.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Movement:
    """Counts attempts over all managers that share it.

    Attributes:
        inflight: Groups that are being generated or scored now.
        attempts: Attempts that ended, well or not.
    """

    def __init__(self) -> None:
        self.inflight = 0
        self.attempts = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Be one attempt for the `with` block."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1
            self.attempts += 1
