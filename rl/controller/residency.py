"""Who is on the devices while the model trains and while weights move.

The step has two phases, training and refit, and does not know which Residency it has. `Dedicated`: trainer and
generator have their own devices, so nothing moves. `Shared`: they take turns on the same ones:

    training:  generators sleep -> moments return to the device -> score and train
    refit:     moments and gradients leave -> generators wake their weights -> publish; before it resumes them,
               they wake their caches

Moving is each side's business, and where there is nothing to move (on a CPU) it is a call that moves 0 bytes; this file
gives the order, and counts.
"""

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from rl.controller.phases import RESIDENCY, Phases
from rl.core.clock import Clock
from rl.generation.generator import WakeTag
from rl.weights.sync import BeforeResume


class Residency(Protocol):
    """The two phases in which a device may have to change hands."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Scoring and training run inside."""
        ...

    def refit(self) -> AbstractAsyncContextManager[BeforeResume]:
        """Weights are published inside, by a refit that does what it is given before generators resume."""
        ...

    def drain(self) -> dict[str, float]:
        """Return what moved since the last call, as metrics by bare name; empty where nothing ever moves."""
        ...


class Offloads(Protocol):
    """A trainer that can make room."""

    async def offload(self) -> int:
        """Move the optimizer's moments to the host and drop gradients; return the bytes that left the device."""
        ...

    async def reload(self) -> int:
        """Bring the moments back; return the bytes that entered the device."""
        ...


class Sleeps(Protocol):
    """A generator that can make room."""

    async def sleep(self) -> int:
        """Stop generating, give up weights and caches; return the bytes that left the device."""
        ...

    async def wake(self, tags: Sequence[WakeTag]) -> int:
        """Take memory again for what the tags name; return the bytes. Weights are those of before, until a refit."""
        ...


class Dedicated:
    """Every model has its own devices."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Nothing to move."""
        yield

    @asynccontextmanager
    async def refit(self) -> AsyncIterator[BeforeResume]:
        """Nothing to move."""
        yield _do_nothing

    def drain(self) -> dict[str, float]:
        """Nothing ever moves."""
        return {}


class Shared:
    """Trainer and generators take turns. After a failure nothing moves any more: whoever handles it finds it as it was.

    What moves outside the refit is a phase of its own; the caches wake within the refit and its time.

    Args:
        trainer: Has the device while it trains.
        generator: Has it otherwise.
        phases: What the train loop is doing.
        clock: Measures the moves.
    """

    def __init__(self, trainer: Offloads, generator: Sleeps, phases: Phases, clock: Clock) -> None:
        self._trainer = trainer
        self._generator = generator
        self._phases = phases
        self._clock = clock
        self._moved: dict[str, float] = {}

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The device is the trainer's inside, and stays so until the refit."""
        with self._phases.span(RESIDENCY):
            await self._move("generator_out", self._generator.sleep())
            await self._move("trainer_in", self._trainer.reload())
        yield

    @asynccontextmanager
    async def refit(self) -> AsyncIterator[BeforeResume]:
        """Both models' weights are on the device inside; what is given wakes the generators' caches."""
        with self._phases.span(RESIDENCY):
            await self._move("trainer_out", self._trainer.offload())
            await self._move("generator_in", self._generator.wake(("weights",)))
        yield self._wake_caches

    def drain(self) -> dict[str, float]:
        """Return mebibytes and seconds by direction since the last call."""
        moved, self._moved = self._moved, {}
        return moved

    async def _wake_caches(self) -> None:
        await self._move("generator_in", self._generator.wake(("kv_cache",)))

    async def _move(self, name: str, call: Awaitable[int]) -> None:
        start = self._clock.now()
        mib = await call / 2**20
        self._add(f"{name}_mib", mib)
        self._add(f"{name}_s", self._clock.now() - start)

    def _add(self, name: str, value: float) -> None:
        self._moved[name] = self._moved.get(name, 0.0) + value


async def _do_nothing() -> None:
    """What a refit has to do where nothing sleeps."""
