"""Who takes part in a refit: the replicas of the generator, servers that others started, and their numbers.

Readers are numbered over all of them: those of a member begin after those of the members before it. A member that is
gone is given up here, and only here.
"""

import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl.core.errors import InfraError
from rl.weights.transport import PauseMode, ReceiverHandle

_log = logging.getLogger(__name__)


class Refittable(Protocol):
    """What a refit needs of a generator."""

    @property
    def num_replicas(self) -> int:
        """Replicas that are left."""
        ...

    def weight_receivers(self) -> list[ReceiverHandle]:
        """One handle per replica that is left."""
        ...

    async def remove_replica(self, name: str, reason: str) -> None:
        """Give up the replica that its handle calls `name`; nothing is sent to it any more."""
        ...


class Server(ReceiverHandle, Protocol):
    """An engine that others started: it is refitted and probed, and answers requests that are not ours."""

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""
        ...


@dataclass(frozen=True)
class Member:
    """One engine of a refit, and the number of its first reader."""

    handle: ReceiverHandle
    first_reader: int

    @property
    def name(self) -> str:
        """Of the replica or server."""
        return self.handle.replica

    @property
    def reader_names(self) -> list[str]:
        """One per rank of the engine."""
        return [f"{self.name}.{rank}" for rank in range(self.handle.num_readers)]


class Fleet:
    """All members of the refits of a run.

    Args:
        generator: Its replicas are asked for at every refit.
        servers: Engines beside them.
        min_replicas: Replicas of the generator that must be left.
    """

    def __init__(self, generator: Refittable, servers: Sequence[Server], min_replicas: int) -> None:
        self._generator = generator
        self._servers = list(servers)
        self._min_replicas = min_replicas

    def members(self) -> list[Member]:
        """Return everybody who is left, numbered."""
        return list(_numbered([*self._generator.weight_receivers(), *self._servers]))

    @property
    def servers(self) -> list[Server]:
        """Those that are left."""
        return list(self._servers)

    def pauses(self, mode: PauseMode) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the calls that stop everybody, by name."""
        return {one.name: self._ask(one.handle, one.handle.pause(mode)) for one in self.members()}

    def resumes(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the calls that let everybody generate again, by name."""
        return {one.name: self._ask(one.handle, one.handle.resume()) for one in self.members()}

    async def give_up(self, name: str, reason: str) -> bool:
        """Give up a member that is gone; False where it is unknown, or too few replicas would be left."""
        for server in self._servers:
            if server.replica == name:
                self._servers.remove(server)
                _log.error("%s is refitted no more: %s", name, reason)
                return True
        known = any(handle.replica == name for handle in self._generator.weight_receivers())
        if not known or self._generator.num_replicas <= self._min_replicas:
            return False
        await self._generator.remove_replica(name, reason)
        left = self._generator.num_replicas
        _log.error("replica %s leaves the fleet, %d are left: %s", name, left, reason)
        return True

    async def _ask(self, engine: ReceiverHandle, call: Coroutine[Any, Any, None]) -> None:
        """A server that is gone does not stop the run: it is not the run's."""
        try:
            await call
        except InfraError as error:
            if engine not in self._servers:
                raise
            await self.give_up(engine.replica, str(error))


def _numbered(handles: Sequence[ReceiverHandle]) -> Iterator[Member]:
    first = 0
    for handle in handles:
        yield Member(handle, first)
        first += handle.num_readers
