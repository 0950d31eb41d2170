"""An event loop whose time passes only while nothing can run: hours of waiting take no time, and no run is like a load.

run_virtually(main())       # AssertionError when everybody waits for what never comes
@virtually                  # the same before an asynchronous test
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class _NoWait:
    """A selector that moves the loop's time instead of waiting."""

    def __init__(self, loop: "VirtualLoop", inner: selectors.BaseSelector) -> None:
        self._loop = loop
        self._inner = inner

    def select(self, timeout: float | None = None) -> Any:
        self._loop.on_turn()
        if timeout is None:
            raise AssertionError("everybody waits, and nothing is due: a stall")
        self._loop.seconds += max(timeout, 0.0)
        return self._inner.select(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a `rl.core.clock.Clock`; calls `on_turn` before every turn, what it raises ends the run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.on_turn: Callable[[], None] = lambda: None
        inner = selectors.DefaultSelector()
        super().__init__(_NoWait(self, inner))  # type: ignore[arg-type]

    def time(self) -> float:
        """Virtual seconds."""
        return self.seconds

    def now(self) -> float:
        """Virtual seconds."""
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Let a test run in virtual time."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        run_virtually(test(*arguments, **named))

    return run
