"""The driver's side of a generator whose replicas are the workers of one group.

It chooses the replica of each request, bounds the requests that a replica has at once, and keeps the version that the
replicas acknowledged; engines live in the workers. It neither restarts replicas nor retries requests.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from rl.cluster.worker_group import WorkerGroup, WorkerRequest
from rl.core.errors import InfraError, WeightSyncError
from rl.core.types import NO_VERSION, Completion, PolicyVersion
from rl.generation.completion import completion_budget
from rl.generation.generator import GeneratorRequest, PauseMode, SamplingParams
from rl.weights.transport import Ack, ReceiverHandle, TransferInfo

_log = logging.getLogger(__name__)

# Calls that a worker serves beside its requests: pausing, aborting and refits never queue behind a completion.
_CONTROL_CALLS = 16
# A call outlives the deadline that the worker keeps itself, so that the worker's own error arrives.
_MARGIN_S = 30.0


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

    def close(self) -> None:
        """End the engine."""
        ...


W = TypeVar("W", bound=GenerationWorker)


def replicas_of(request: GeneratorRequest, num_replicas: int, max_in_flight: int, longest_s: float) -> WorkerRequest:
    """Return the worker group of a generator.

    Args:
        request: Derived settings.
        num_replicas: Workers.
        max_in_flight: Requests that one replica has at once; see `PooledGenerator`.
        longest_s: The longest deadline that a worker keeps itself, in seconds.
    """
    return WorkerRequest(
        name="generation",
        num_workers=num_replicas,
        num_threads=request.num_threads,
        gpus_per_worker=request.gpus_per_replica,
        concurrency=max_in_flight + _CONTROL_CALLS,
        call_timeout_s=longest_s + _MARGIN_S,
    )


class PooledGenerator(Generic[W]):
    """A Generator over the replicas of a worker group; each request goes to the replica with the fewest in flight.

    Args:
        group: One worker per replica.
        worker_class: Their class.
        request: What the replicas were built with.
        max_in_flight: Requests that one replica has at once; further ones wait here, where no deadline runs yet.
    """

    def __init__(
        self, group: WorkerGroup[W], worker_class: type[W], request: GeneratorRequest, max_in_flight: int
    ) -> None:
        self._group = group
        self._worker = worker_class
        self._max_model_len = request.max_model_len
        self._places = [asyncio.Semaphore(max_in_flight) for _ in range(group.world_size)]
        self._in_flight = [0] * group.world_size
        loaded = NO_VERSION if request.loaded_version is None else request.loaded_version
        self._versions = [loaded] * group.world_size
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def version(self) -> PolicyVersion:
        """The version that every replica acknowledged; before the first refit that of the loaded weights or NO_VERSION.

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
            await self._places[rank].acquire()
            return await self._sample(rank, tuple(prompt_tokens), params, request_id)
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
        return [
            _Receiver(self._group, self._worker, rank, partial(self._versions.__setitem__, rank))
            for rank in range(self._group.world_size)
        ]

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

    async def _sample(
        self, rank: int, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str
    ) -> Completion:
        """Use a place of the replica; a cancelled request gives it back only when the worker has given it up too."""
        try:
            completion = await self._group.call(rank, self._worker.generate, prompt_tokens, params, request_id)
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._abort(rank, request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise
        except BaseException:
            self._places[rank].release()
            raise
        self._places[rank].release()
        return completion

    async def _abort(self, rank: int, request_id: str) -> None:
        try:
            await self._group.call(rank, self._worker.abort, request_id)
        except InfraError as error:
            _log.warning("request %s could not be aborted: %s", request_id, error)
        finally:
            self._places[rank].release()


class _Receiver(Generic[W]):
    """One replica's end of a refit; `acknowledged` gets each version that the replica holds."""

    def __init__(
        self, group: WorkerGroup[W], worker_class: type[W], rank: int, acknowledged: Callable[[PolicyVersion], None]
    ) -> None:
        self._group = group
        self._worker = worker_class
        self._rank = rank
        self._acknowledged = acknowledged

    @property
    def replica(self) -> str:
        """A name for messages."""
        return f"generation[{self._rank}]"

    async def init(self, info: TransferInfo) -> None:
        """Open the transport."""
        await self._group.call(self._rank, self._worker.init_transfer, info)

    async def start(self, version: PolicyVersion) -> None:
        """Begin a refit."""
        await self._group.call(self._rank, self._worker.start_update, version)

    async def update(self, bucket: int) -> None:
        """Load one bucket."""
        await self._group.call(self._rank, self._worker.update, bucket)

    async def finish(self, version: PolicyVersion) -> Ack:
        """Commit."""
        ack = await self._group.call(self._rank, self._worker.finish_update, version)
        self._acknowledged(ack.version)
        return ack
