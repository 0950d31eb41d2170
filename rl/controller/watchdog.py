"""Watches that the run moves: attempts must end while the trainer waits for rollouts, and every other phase must end.

consumes: a Progress snapshot per look
produces: nothing, a warning, or StallError naming what is awaited
waits for: the clock alone
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rl.core.clock import Clock
from rl.core.errors import StallError
from rl.rollout.config import StallWatchdogConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What has moved so far.

    Attributes:
        counter: Changes whenever the awaited thing moves.
        awaited: Name of the present phase, with the figures that help to find the culprit.
        deadline_s: How long this phase may go without a change; None = the configured stall timeout.
    """

    counter: tuple[int, ...]
    awaited: str
    deadline_s: float | None


class Watchdog:
    """Looks every interval_s.

    Args:
        config: Interval, timeout and what a stall does.
        look: Returns the present progress.
        clock: Time.
    """

    def __init__(self, config: StallWatchdogConfig, look: Callable[[], Progress], clock: Clock) -> None:
        self._config = config
        self._look = look
        self._clock = clock

    async def run(self) -> None:
        """Look until cancelled.

        Raises:
            StallError: nothing moved within the deadline, and the configured action is abort.
        """
        last, since, warned = self._look().counter, self._clock.now(), False
        while True:
            await self._clock.sleep(self._config.interval_s)
            progress = self._look()
            if progress.counter != last:
                last, since, warned = progress.counter, self._clock.now(), False
            idle = self._clock.now() - since
            if warned or idle <= (progress.deadline_s or self._config.stall_timeout_s):
                continue
            message = f"nothing has moved for {idle:.0f} s while waiting for {progress.awaited}"
            if self._config.stall_action == "abort":
                raise StallError(
                    f"{message}; async_rl.stall_watchdog.stall_timeout_s bounds this, stall_action=warn goes on"
                )
            _log.warning("%s; going on, because async_rl.stall_watchdog.stall_action=warn", message)
            warned = True
