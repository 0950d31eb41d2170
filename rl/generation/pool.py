"""The driver's side of a generator whose replicas are the workers of one group.

It chooses the replica of each request, bounds the requests that a replica has at once, and keeps the version that the
replicas acknowledged; engines live in the workers. A replica that is removed gets nothing any more. It neither restarts
replicas nor retries requests.
"""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rl.cluster.worker_group import WorkerGroup, WorkerRequest
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import CompletionError, InfraError, WeightSyncError
from rl.core.types import NO_VERSION, Completion, PolicyVersion
from rl.generation.completion import completion_budget
from rl.generation.generator import GeneratorRequest, SamplingParams, WakeTag
from rl.weights.transport import Ack, PauseMode, ReceiverHandle, RefitStart, TransferInfo

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

    def sleep(self) -> int:
        """Finish requests, pause and give up memory; return the bytes that left the device."""
        ...

    def wake(self, tags: tuple[WakeTag, ...]) -> int:
        """Take memory again; return the bytes that entered the device."""
        ...

    def score(self, tokens: tuple[int, ...]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""
        ...

    def init_transfer(self, info: TransferInfo, first_reader: int) -> None:
        """Join the refit's links."""
        ...

    def start_update(self, start: RefitStart) -> None:
        """Begin a refit."""
        ...

    def update(self) -> None:
        """Receive and load all buckets."""
        ...

    def finish_update(self, version: PolicyVersion) -> Ack:
        """Commit the refit."""
        ...

    def abort_update(self, reason: str) -> None:
        """Give up a transfer that another call waits for."""
        ...

    def signatures(self) -> Mapping[str, Sequence[float]]:
        """Return the signature of every tensor as the engine computes with it."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


W = TypeVar("W", bound=GenerationWorker)
R = TypeVar("R")
P = ParamSpec("P")


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
        readers_per_replica: Processes of one engine that receive in a refit.
    """

    def __init__(
        self,
        group: WorkerGroup[W],
        worker_class: type[W],
        request: GeneratorRequest,
        max_in_flight: int,
        readers_per_replica: int = 1,
    ) -> None:
        self._group = group
        self._worker = worker_class
        self._readers_per_replica = readers_per_replica
        self._replicas = list(range(group.world_size))
        self._max_model_len = request.max_model_len
        self._places = [asyncio.Semaphore(max_in_flight) for _ in range(group.world_size)]
        self._in_flight = [0] * group.world_size
        self._is_failing = [False] * group.world_size
        self._unanswered = [0] * group.world_size
        loaded = NO_VERSION if request.loaded_version is None else request.loaded_version
        self._versions = [loaded] * group.world_size
        self._requests: list[set[asyncio.Task[Completion]]] = [set() for _ in range(group.world_size)]
        self._late: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def version(self) -> PolicyVersion:
        """The version that every replica acknowledged; before the first refit that of the loaded weights or NO_VERSION.

        Raises:
            WeightSyncError: the replicas hold different versions: a refit failed half-way.
        """
        versions = [self._versions[rank] for rank in self._replicas]
        if len(set(versions)) != 1:
            raise WeightSyncError(f"replicas hold different versions {versions}; the last refit did not complete")
        return versions[0]

    @property
    def num_replicas(self) -> int:
        """Replicas that are left."""
        return len(self._replicas)

    async def generate(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str, session: str
    ) -> Completion:
        """Sample one completion; a cancelled call is aborted in the engine too. See `Generator.generate`."""
        completion_budget(request_id, prompt_tokens, params.max_new_tokens, self._max_model_len)
        rank = self._choose(session)
        self._in_flight[rank] += 1
        # A task of its own, so that it can be ended when the replica leaves: one that hangs answers to nobody.
        answer = asyncio.ensure_future(self._sample(rank, tuple(prompt_tokens), params, request_id))
        self._requests[rank].add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if rank in self._replicas or (task is not None and task.cancelling()):
                raise
            raise InfraError(
                f"{replica_name(rank)} was given up with request {request_id} in flight; retry it"
            ) from None
        finally:
            self._requests[rank].discard(answer)
            self._in_flight[rank] -= 1

    async def sleep(self) -> int:
        """Let all replicas give up their memory. See `Generator.sleep`."""
        return sum((await self._on_reachable("sleep", None, self._worker.sleep)).values())

    async def wake(self, tags: Sequence[WakeTag]) -> int:
        """Let all replicas take memory again. See `Generator.wake`."""
        return sum((await self._on_reachable("wake", None, self._worker.wake, tuple(tags))).values())

    async def score(self, tokens: Sequence[int], timeout_s: float) -> dict[str, list[float]]:
        """Score a sequence on every replica. See `Generator.score`."""
        answers = await self._on_reachable("score", timeout_s, self._worker.score, tuple(tokens))
        return {replica_name(rank): scores for rank, scores in answers.items()}

    def weight_receivers(self) -> list[ReceiverHandle]:
        """One handle per replica that is left."""
        return [
            _Receiver(
                self._group,
                self._worker,
                rank,
                self._readers_per_replica,
                partial(self._acknowledge, rank),
            )
            for rank in self._replicas
        ]

    async def remove_replica(self, name: str, reason: str) -> None:
        """Give up a replica; its requests fail, those that wait too, and its engine is ended where it still listens.

        Raises:
            InfraError: it is unknown, or the last one.
        """
        rank = next((rank for rank in self._replicas if replica_name(rank) == name), None)
        if rank is None:
            raise InfraError(f"{name} is none of {', '.join(map(replica_name, self._replicas))}")
        if len(self._replicas) == 1:
            raise InfraError(f"{name} is the last replica and cannot be given up: {reason}")
        self._replicas.remove(rank)
        for request in list(self._requests[rank]):
            request.cancel()
        self._keep(asyncio.ensure_future(self._retire(rank)))

    async def close(self) -> None:
        """End the engines, then the workers; idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*self._late, return_exceptions=True)
        try:
            await self._on_all(self._worker.close)
        except InfraError as error:
            _log.warning("a generation worker was gone before it was closed: %s", error)
        finally:
            await self._group.close()

    async def _on_all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of every replica that is left; results in order."""
        ranks = list(self._replicas)
        return await gather_or_cancel([self._group.call(rank, method, *args, **kwargs) for rank in ranks])

    async def _on_reachable(
        self,
        what: str,
        timeout_s: float | None,
        method: Callable[Concatenate[W, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> dict[int, R]:
        """Call a method of every replica that is left; results of those that answer, by rank.

        Args:
            what: For messages.
            timeout_s: Of each answer; None = that of any call.
            method: Of the worker.
            args: Its own.
            kwargs: Its own.

        Raises:
            InfraError: none can be reached. What else a replica raises is raised too.
        """
        ranks = list(self._replicas)
        calls = [_within(timeout_s, self._group.call(rank, method, *args, **kwargs)) for rank in ranks]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failures = {rank: one for rank, one in zip(ranks, answers, strict=True) if isinstance(one, BaseException)}
        fatal = [error for error in failures.values() if not isinstance(error, InfraError)]
        if fatal or len(failures) == len(ranks):
            raise [*fatal, *failures.values()][0]
        for rank, error in failures.items():
            _log.error("%s did not %s: %s", replica_name(rank), what, error)
        return {rank: one for rank, one in zip(ranks, answers, strict=True) if not isinstance(one, BaseException)}

    def _acknowledge(self, rank: int, version: PolicyVersion) -> None:
        self._versions[rank] = version
        self._is_failing[rank] = False

    def _choose(self, session: str) -> int:
        """Fewest in flight; ties go to the session's own replica, whose prefix cache is warm.

        One that is dead or hangs never has many in flight, as they fail at once or are given up: whose last request
        failed, until a refit has reached it, and who owes the answer to an abort come after all others.
        """
        replicas = len(self._in_flight)
        home = zlib.crc32(session.encode()) % replicas
        return min(
            self._replicas,
            key=lambda rank: (
                self._is_failing[rank] or self._unanswered[rank] > 0,
                self._in_flight[rank],
                (rank - home) % replicas,
            ),
        )

    async def _sample(
        self, rank: int, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str
    ) -> Completion:
        """Use a place of the replica; a cancelled request gives it back only when the worker has given it up too."""
        await self._places[rank].acquire()
        try:
            completion = await self._group.call(rank, self._worker.generate, prompt_tokens, params, request_id)
        except asyncio.CancelledError:
            self._keep(asyncio.ensure_future(self._abort(rank, request_id)))
            raise
        except BaseException as error:
            self._is_failing[rank] |= isinstance(error, InfraError) and not isinstance(error, CompletionError)
            self._places[rank].release()
            raise
        self._is_failing[rank] = False
        self._places[rank].release()
        return completion

    async def _abort(self, rank: int, request_id: str) -> None:
        self._unanswered[rank] += 1
        try:
            if rank in self._replicas:
                await self._group.call(rank, self._worker.abort, request_id)
        except InfraError as error:
            self._is_failing[rank] = True
            _log.warning("request %s could not be aborted: %s", request_id, error)
        finally:
            self._unanswered[rank] -= 1
            self._places[rank].release()

    async def _retire(self, rank: int) -> None:
        """End an engine that was given up, if it still listens; its process ends with the group at the latest."""
        try:
            async with asyncio.timeout(_MARGIN_S):
                await self._group.call(rank, self._worker.close)
        except (InfraError, TimeoutError) as error:
            _log.warning("%s did not end by itself: %s", replica_name(rank), str(error) or "it was late")

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._late.add(task)
        task.add_done_callback(self._late.discard)


class _Receiver(Generic[W]):
    """One replica's end of a refit; `acknowledged` gets each version that the replica holds."""

    def __init__(
        self,
        group: WorkerGroup[W],
        worker_class: type[W],
        rank: int,
        num_readers: int,
        acknowledged: Callable[[PolicyVersion], None],
    ) -> None:
        self._group = group
        self._worker = worker_class
        self._rank = rank
        self._num_readers = num_readers
        self._acknowledged = acknowledged

    @property
    def replica(self) -> str:
        """A name for messages."""
        return replica_name(self._rank)

    @property
    def num_readers(self) -> int:
        """Processes of the engine that receive."""
        return self._num_readers

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        await self._group.call(self._rank, self._worker.pause, mode)

    async def init(self, info: TransferInfo, first_reader: int) -> None:
        """Join the links."""
        await self._group.call(self._rank, self._worker.init_transfer, info, first_reader)

    async def start(self, start: RefitStart) -> None:
        """Begin a refit."""
        await self._group.call(self._rank, self._worker.start_update, start)

    async def update(self) -> None:
        """Receive and load all buckets."""
        await self._group.call(self._rank, self._worker.update)

    async def finish(self, version: PolicyVersion) -> Ack:
        """Commit."""
        ack = await self._group.call(self._rank, self._worker.finish_update, version)
        self._acknowledged(ack.version)
        return ack

    async def resume(self) -> None:
        """Generate again."""
        await self._group.call(self._rank, self._worker.resume)

    async def abort(self, reason: str) -> None:
        """Give up what is under way; a worker serves it beside the call that waits for the transfer."""
        try:
            await self._group.call(self._rank, self._worker.abort_update, reason)
        except InfraError as error:
            _log.warning("%s could not be told to give up: %s", self.replica, error)

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        """Return what the layers compute."""
        return await self._group.call(self._rank, self._worker.signatures)


async def _within(timeout_s: float | None, call: Awaitable[R]) -> R:
    if timeout_s is None:
        return await call
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise InfraError(f"no answer within {timeout_s:g} s") from None


def replica_name(rank: int) -> str:
    """Return the name of a replica in messages."""
    return f"generation[{rank}]"
