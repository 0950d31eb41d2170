"""The driver's side of a generator whose replicas are the workers of one group.

It chooses the replica of each request and keeps the version that the replicas acknowledged; engines live in the
workers. It neither restarts replicas nor retries requests.
"""

import asyncio
import logging
import zlib
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from rl.cluster.worker_group import WorkerGroup
from rl.core.errors import InfraError, WeightSyncError
from rl.core.types import Completion, PolicyVersion
from rl.generation.completion import completion_budget
from rl.generation.generator import PauseMode, SamplingParams
from rl.weights.transport import Ack, ReceiverHandle, TransferInfo

_log = logging.getLogger(__name__)

NO_VERSION: PolicyVersion = -1


class GenerationWorker(Protocol):
    """What a replica's worker offers; synchronous, and called by many threads at once."""

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        """Sample one completion."""
        ...

    def abort(self, request_id: str) -> None:
        """Give up a request; unknown ones are ignored."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        ...

    def resume(self) -> None:
        """Generate again."""
        ...

    def init_transfer(self, info: TransferInfo) -> None:
        """Open the refit's transport."""
        ...

    def start_update(self, version: PolicyVersion) -> None:
        """Begin a refit."""
        ...

    def update(self, bucket: int) -> None:
        """Load one bucket."""
        ...

    def finish_update(self, version: PolicyVersion) -> Ack:
        """Commit the refit."""
        ...

    def health(self) -> None:
        """Return when the engine answers."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


W = TypeVar("W", bound=GenerationWorker)


class PooledGenerator(Generic[W]):
    """A Generator over the replicas of a worker group; each request goes to the replica with the fewest in flight.

    Args:
        group: One worker per replica.
        worker_class: Their class.
        max_model_len: Longest prompt + completion, in tokens.
    """

    def __init__(self, group: WorkerGroup[W], worker_class: type[W], max_model_len: int) -> None:
        self._group = group
        self._worker = worker_class
        self._max_model_len = max_model_len
        self._in_flight = [0] * group.world_size
        self._versions = [NO_VERSION] * group.world_size
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def version(self) -> PolicyVersion:
        """The version that every replica acknowledged; NO_VERSION before the first refit.

        Raises:
            WeightSyncError: the replicas hold different versions: a refit failed half-way.
        """
        if len(set(self._versions)) != 1:
            raise WeightSyncError(f"replicas hold different versions {self._versions}; the last refit did not complete")
        return self._versions[0]

    async def generate(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str, session: str
    ) -> Completion:
        """Sample one completion; a cancelled call is aborted in the engine too. See `Generator.generate`."""
        completion_budget(request_id, prompt_tokens, params.max_new_tokens, self._max_model_len)
        rank = self._choose(session)
        self._in_flight[rank] += 1
        try:
            return await self._group.call(rank, self._worker.generate, tuple(prompt_tokens), params, request_id)
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._abort(rank, request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise
        finally:
            self._in_flight[rank] -= 1

    async def pause(self, mode: PauseMode) -> None:
        """Stop all replicas. See `Generator.pause`."""
        await self._group.broadcast(self._worker.pause, mode)

    async def resume(self) -> None:
        """Let all replicas generate again."""
        await self._group.broadcast(self._worker.resume)

    def weight_receivers(self) -> list[ReceiverHandle]:
        """One handle per replica."""
        return [_Receiver(self, rank) for rank in range(self._group.world_size)]

    async def check_health(self) -> list[bool]:
        """Whether each replica's engine answers."""
        checks = [self._group.call(rank, self._worker.health) for rank in range(self._group.world_size)]
        return [result is None for result in await asyncio.gather(*checks, return_exceptions=True)]

    async def close(self) -> None:
        """End the engines, then the workers; idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*self._aborts, return_exceptions=True)
        try:
            await self._group.broadcast(self._worker.close)
        except InfraError as error:
            _log.warning("a generation worker was gone before it was closed: %s", error)
        finally:
            await self._group.close()

    def _choose(self, session: str) -> int:
        """Fewest in flight; ties go to the session's own replica, whose prefix cache is warm."""
        replicas = len(self._in_flight)
        home = zlib.crc32(session.encode()) % replicas
        return min(range(replicas), key=lambda rank: (self._in_flight[rank], (rank - home) % replicas))

    async def _abort(self, rank: int, request_id: str) -> None:
        try:
            await self._group.call(rank, self._worker.abort, request_id)
        except InfraError as error:
            _log.warning("request %s could not be aborted: %s", request_id, error)


class _Receiver(Generic[W]):
    """One replica's end of a refit."""

    def __init__(self, pool: PooledGenerator[W], rank: int) -> None:
        self._pool = pool
        self._rank = rank

    @property
    def replica(self) -> str:
        """A name for messages."""
        return f"generation[{self._rank}]"

    async def init(self, info: TransferInfo) -> None:
        """Open the transport."""
        await self._pool._group.call(self._rank, self._pool._worker.init_transfer, info)

    async def start(self, version: PolicyVersion) -> None:
        """Begin a refit."""
        await self._pool._group.call(self._rank, self._pool._worker.start_update, version)

    async def update(self, bucket: int) -> None:
        """Load one bucket."""
        await self._pool._group.call(self._rank, self._pool._worker.update, bucket)

    async def finish(self, version: PolicyVersion) -> Ack:
        """Commit; the replica's acknowledged version is remembered."""
        ack = await self._pool._group.call(self._rank, self._pool._worker.finish_update, version)
        self._pool._versions[self._rank] = ack.version
        return ack
