"""Who is on the devices while the model trains and while weights move.

Trainer and generator have their own devices here, so both phases are open at once and nothing moves. Sharing devices is
another Residency with the same two phases; the step does not know which one it has.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol


class Residency(Protocol):
    """The two phases in which a device may have to change hands."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Scoring and training run inside."""
        ...

    def refit(self) -> AbstractAsyncContextManager[None]:
        """Weights are published inside."""
        ...


class Dedicated:
    """Every model has its own devices."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Nothing to move."""
        yield

    @asynccontextmanager
    async def refit(self) -> AsyncIterator[None]:
        """Nothing to move."""
        yield
