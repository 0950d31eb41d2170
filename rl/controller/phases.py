"""What the train loop is doing now, and how long each phase took."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl.core.clock import Clock
from rl.core.metrics import Timers

IDLE = "idle"
GENERATION = "exposed_generation"
DATA = "data_processing"
LOGPROBS = "policy_and_reference_logprobs"
ADVANTAGES = "advantage_calculation"
TRAINING = "policy_training"
RESIDENCY = "residency"
WEIGHT_SYNC = "weight_sync"
VALIDATION = "validation"
CHECKPOINTING = "checkpointing"
TOTAL = "total_step_time"


class Phases:
    """Times phases, counts their changes, and tells a listener.

    Args:
        clock: Time.
        listener: Called with the name of each phase that begins.

    Attributes:
        current: The phase now, or IDLE.
        last: The phase now, or the one before when IDLE.
        changes: Begins and ends so far.
    """

    def __init__(self, clock: Clock, listener: Callable[[str], None]) -> None:
        self._timers = Timers(clock)
        self._listener = listener
        self.current = IDLE
        self.last = IDLE
        self.changes = 0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Be in phase `name` for the `with` block; phases do not nest."""
        self._enter(name)
        try:
            with self._timers.span(name):
                yield
        finally:
            self._enter(IDLE)

    @contextmanager
    def total(self) -> Iterator[None]:
        """Time a whole step around its phases."""
        with self._timers.span(TOTAL):
            yield

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        return self._timers.drain()

    def _enter(self, name: str) -> None:
        self.current = name
        self.changes += 1
        if name != IDLE:
            self.last = name
            self._listener(name)
