"""Workers in this process: each worker has its own few threads. For tests, debugging and machines without Ray.

What it cannot do: end a worker that hangs (a thread cannot be killed) and give workers their own torch thread counts
(torch counts per process). A hanging call still gets its InfraError at the deadline.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rl.cluster.calls import CalledGroup
from rl.cluster.config import ClusterConfig
from rl.cluster.daemon_pool import DaemonPool
from rl.cluster.devices import count_gpus
from rl.cluster.worker_group import WorkerContext, WorkerGroup, WorkerRequest
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import ConfigError, InfraError, RLError
from rl.core.imports import import_object
from rl.core.resources import RunResources

W = TypeVar("W")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class LocalSlot(Generic[W]):
    """One worker with its threads."""

    context: WorkerContext
    pool: DaemonPool
    worker: W | None = None
    overdue: list["Future[Any]"] = field(default_factory=list)

    def is_healthy(self) -> bool:
        """Whether the worker was built and no call hangs past its deadline."""
        self.overdue = [future for future in self.overdue if not future.done()]
        return self.worker is not None and not self.overdue


class LocalWorkerGroup(CalledGroup[W]):
    """A WorkerGroup whose workers are objects in this process."""

    def __init__(self, request: WorkerRequest, build: Callable[[WorkerContext], W], start_timeout_s: float) -> None:
        super().__init__(request)
        self._build = build
        self._start_timeout_s = start_timeout_s
        self._slots: list[LocalSlot[W]] = []
        self._closed = False

    async def start(self, contexts: Sequence[WorkerContext]) -> None:
        """Construct the workers, all at once."""
        self._slots = [self._slot(context) for context in contexts]
        await gather_or_cancel([self._construct(slot) for slot in self._slots])

    async def check_health(self) -> list[bool]:
        """Whether each worker answers: it was built, and no call of it hangs past its deadline."""
        return [not self._closed and slot.is_healthy() for slot in self._slots]

    async def restart(self, rank: int) -> None:
        """Replace one worker by a fresh one; a hanging call of the old one keeps its thread."""
        self.check_rank(rank)
        if self._closed:
            raise self.closed(rank, "restart")
        self._slots[rank].pool.close()
        self._slots[rank] = self._slot(self._slots[rank].context)
        await self._construct(self._slots[rank])

    async def close(self) -> None:
        """End all workers; idempotent."""
        self._closed = True
        for slot in self._slots:
            slot.pool.close()
            slot.worker = None

    def _slot(self, context: WorkerContext) -> LocalSlot[W]:
        return LocalSlot(context, DaemonPool(f"{context.name}-{context.rank}", self.request.concurrency))

    async def _construct(self, slot: LocalSlot[W]) -> None:
        rank = slot.context.rank
        try:
            construct = partial(self._build, slot.context)
            slot.worker = await self._finish(slot, construct, "its start", self._start_timeout_s)
        except RLError as error:
            error.add_note(f"raised while {self.label(rank)} was constructed")
            raise
        except Exception as error:
            raise InfraError(f"{self.label(rank)} could not be built: {type(error).__name__}: {error}") from error

    async def _invoke(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        slot = self._slots[rank]
        worker = slot.worker
        if self._closed or worker is None:
            raise self.closed(rank, method)
        call = partial(methodcaller(method, *args, **kwargs), worker)
        return await self._finish(slot, call, method, self.request.call_timeout_s)

    async def _finish(self, slot: LocalSlot[W], function: Callable[[], T], method: str, timeout_s: float) -> T:
        """Run a function on the worker's threads, with its deadline."""
        rank = slot.context.rank
        future = slot.pool.submit(function)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not deadline.expired():
                error.add_note(f"raised in {self.label(rank)}.{method}")
                raise
            slot.overdue.append(future)
            raise self.overdue(rank, method, timeout_s) from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise InfraError(f"{self.label(rank)} left {method} with {error!r}") from error
        except Exception as error:
            error.add_note(f"raised in {self.label(rank)}.{method}")
            raise


class LocalCluster:
    """A Cluster in this process."""

    def __init__(self, config: ClusterConfig, run: RunResources) -> None:
        self._config = config
        self._run = run
        self._groups: list[WorkerGroup[Any]] = []
        self._stores: list[object] = []
        self._used_gpus = 0

    async def start_workers(
        self,
        worker_class: Callable[Concatenate[WorkerContext, P], W],
        request: WorkerRequest,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> WorkerGroup[W]:
        """Start a group; each worker is built as `worker_class(context, *args, **kwargs)` on its own thread."""
        first_gpu = self._take_gpus(request)
        rendezvous = self._serve_rendezvous() if request.num_workers > 1 else ""
        contexts = [
            WorkerContext(
                name=request.name,
                rank=rank,
                world_size=request.num_workers,
                local_rank=rank,
                rendezvous=rendezvous,
                device=f"cuda:{first_gpu + rank * request.gpus_per_worker}" if request.gpus_per_worker else "cpu",
                num_threads=request.num_threads,
                run_tag=self._run.tag,
            )
            for rank in range(request.num_workers)
        ]
        # Loading a model may take far longer than a call of a small worker: the longer deadline holds, as over Ray.
        deadline_s = max(self._config.start_timeout_s, request.call_timeout_s)
        group = LocalWorkerGroup[W](request, lambda context: worker_class(context, *args, **kwargs), deadline_s)
        try:
            await group.start(contexts)
        except BaseException:
            await group.close()
            raise
        self._groups.append(group)
        return group

    async def shutdown(self) -> None:
        """Close every group; idempotent."""
        for group in self._groups:
            await group.close()
        self._groups.clear()
        self._stores.clear()

    def _serve_rendezvous(self) -> str:
        serve: Any = import_object("rl.cluster.rendezvous:serve_store")
        store, address = serve("127.0.0.1")
        self._stores.append(store)
        return str(address)

    def _take_gpus(self, request: WorkerRequest) -> int:
        """Reserve the group's GPUs; return the index of the first."""
        wanted = request.num_workers * request.gpus_per_worker
        offered = min(self._config.gpus_per_node, count_gpus())
        if wanted > offered - self._used_gpus:
            raise ConfigError(
                f"group {request.name} wants {wanted} GPUs ({request.num_workers} workers x "
                f"{request.gpus_per_worker}), {offered - self._used_gpus} are free "
                f"(cluster.gpus_per_node={self._config.gpus_per_node}, "
                f"{count_gpus()} on this host, {self._used_gpus} taken by other groups)"
            )
        first = self._used_gpus
        self._used_gpus += wanted
        return first
