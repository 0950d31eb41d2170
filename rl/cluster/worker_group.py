"""How workers are called. A worker is a plain class whose constructor takes a WorkerContext first.

    group = await cluster.start_workers(PolicyWorker, WorkerRequest(name="policy"), config)
    results = await group.broadcast(PolicyWorker.train, batch)

The method is passed as the function object, so that a type checker sees arguments and results. Driver-side calls are
`async` and every one has the group's deadline; worker methods are synchronous.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")


@dataclass(frozen=True)
class WorkerContext:
    """All that a worker knows of the outside.

    Attributes:
        name: Name of the group, for messages.
        rank: Rank in the group.
        world_size: Workers in the group.
        local_rank: Rank on this host.
        rendezvous: `host:port` of rank 0 for collectives; empty when world_size is 1.
        device: "cpu" or "cuda:i".
        num_threads: CPU threads that the worker must set for torch and its engine.
        run_tag: Tag of the run; prefix of every shm segment, socket and temporary folder.
    """

    name: str
    rank: int
    world_size: int
    local_rank: int
    rendezvous: str
    device: str
    num_threads: int
    run_tag: str


@dataclass(frozen=True)
class WorkerRequest:
    """What a group needs.

    Attributes:
        name: Name of the group ("policy", "generation").
        num_workers: Processes.
        num_threads: CPU threads of each.
        gpus_per_worker: GPUs of each.
        concurrency: Calls that one worker serves at the same time (a generator serves many).
        call_timeout_s: Deadline of one call, in seconds.
    """

    name: str
    num_workers: int
    num_threads: int
    gpus_per_worker: int
    concurrency: int
    call_timeout_s: float


class WorkerGroup(Protocol[W_co]):
    """A set of workers of one class."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        ...

    async def broadcast(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` on every worker with the same arguments; results in rank order."""
        ...

    async def scatter(
        self, method: Callable[Concatenate[W_co, S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call `method` on worker i with shard i first; there must be one shard per worker."""
        ...

    async def call(self, rank: int, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on one worker.

        Raises:
            InfraError: the worker died or the deadline passed; names group, rank and method, with the last
                lines of the worker's stderr where there are any. A worker's own RLError arrives as it was raised.
        """
        ...

    async def check_health(self) -> list[bool]:
        """Whether each worker answers."""
        ...

    async def restart(self, rank: int) -> None:
        """Replace one worker by a fresh one."""
        ...

    async def close(self) -> None:
        """End all workers; idempotent."""
        ...


class Cluster(Protocol):
    """Where workers run: the common face of the Ray and the local virtual cluster."""

    async def start_workers(
        self,
        worker_class: Callable[Concatenate[WorkerContext, P], W],
        request: WorkerRequest,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> WorkerGroup[W]:
        """Start a group; each worker is built as `worker_class(context, *args, **kwargs)` in its own process.

        Raises:
            ConfigError: the cluster lacks the requested resources; names requested and available.
            InfraError: a worker's constructor failed; carries its error.
        """
        ...

    async def shutdown(self) -> None:
        """End every group and whatever the cluster itself started; idempotent."""
        ...
