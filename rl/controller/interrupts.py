"""SIGINT and SIGTERM: the first asks for a clean stop and enforces it after a while; the second ends the process."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from rl.controller.stop import StopSignal

EXIT_INTERRUPTED = 130
# Terminals and launchers deliver one request to a process and to its group, so twice: that is no second wish.
SAME_REQUEST_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handles the signals while its `with` block runs; enter it on the loop, in the task that a late stop cancels.

    Args:
        stop: What the first signal sets.
        say: Tells the user.
        last_words: Called before the process ends on the second signal; must be quick.
        deadline_s: How long the phase under way may take after the first signal; then the task is cancelled.
    """

    def __init__(
        self, stop: StopSignal, say: Callable[[str], None], last_words: Callable[[], None], deadline_s: float
    ) -> None:
        self._stop = stop
        self._say = say
        self._last_words = last_words
        self._deadline_s = deadline_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._enforced: asyncio.TimerHandle | None = None
        self._first_at = 0.0
        self._setting_up = True

    def __enter__(self) -> "Interrupts":
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._install(self._loop)
        return self

    def set_up_is_over(self) -> None:
        """From now on the first signal lets the present phase end; handlers that a library has put in front go."""
        self._setting_up = False
        if self._loop is not None:
            self._install(self._loop)

    def __exit__(self, *_: object) -> None:
        if self._enforced is not None:
            self._enforced.cancel()
        if self._loop is not None:
            for number in _SIGNALS:
                self._loop.remove_signal_handler(number)

    def _install(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)

    def _on_signal(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._stop.requested:
            if now - self._first_at < SAME_REQUEST_S:
                return
            self._end_now(name)
        self._first_at = now
        self._stop.request()
        self._say(f"{name}: stopping cleanly (again to stop at once)")
        if self._loop is None or self._task is None:
            return
        # Setting up holds nothing that is worth waiting for.
        delay = 0.0 if self._setting_up else self._deadline_s
        self._enforced = self._loop.call_later(delay, self._task.cancel)

    def _end_now(self, name: str) -> NoReturn:
        """Leave without closing anything: the run's reaper ends what is left."""
        self._say(f"{name} again: ending at once")
        self._last_words()
        os._exit(EXIT_INTERRUPTED)
