"""One call of a refit at a time in a worker: a late one may still be running when the refit is tried again."""

import contextlib
import threading
from collections.abc import Iterator

from rl.core.errors import InfraError


class RefitLock:
    """A lock with a deadline and a name.

    Args:
        replica: Whose it is, for messages.
        timeout_s: How long a call waits for the one before it, in seconds.
    """

    def __init__(self, replica: str, timeout_s: float) -> None:
        self._replica = replica
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, phase: str) -> Iterator[None]:
        """Hold the lock for the `with` block.

        Raises:
            InfraError: an earlier call did not end in time.
        """
        if not self._lock.acquire(timeout=self._timeout_s):
            raise InfraError(
                f"{self._replica}: {phase} waited in vain for an earlier call of a refit to end ({self._timeout_s:g} s)"
            )
        try:
            yield
        finally:
            self._lock.release()
