"""What every worker group shares: checks of ranks and shards, and the words of its errors.

It does not know how a call reaches its worker: see local.py and ray.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rl.cluster.worker_group import WorkerRequest
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import FatalError, InfraError

W = TypeVar("W")
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")


class CalledGroup(ABC, Generic[W]):
    """The calling half of a WorkerGroup, over one `_invoke`."""

    def __init__(self, request: WorkerRequest) -> None:
        self.request = request

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.request.num_workers

    async def broadcast(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` on every worker with the same arguments; results in rank order."""
        shared = self._share(args)
        shared_kwargs = dict(zip(kwargs, self._share(tuple(kwargs.values())), strict=True))
        ranks = range(self.world_size)
        return await gather_or_cancel([self._invoke(rank, method.__name__, shared, shared_kwargs) for rank in ranks])

    async def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call `method` on worker i with shard i first.

        Raises:
            FatalError: the number of shards is not the number of workers.
        """
        if len(shards) != self.world_size:
            raise FatalError(
                f"{self.request.name}.{method.__name__} got {len(shards)} shards for {self.world_size} workers; "
                "pass exactly one shard per worker"
            )
        shared = self._share(args)
        calls = [self._invoke(i, method.__name__, (shard, *shared), kwargs) for i, shard in enumerate(shards)]
        return await gather_or_cancel(calls)

    async def call(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on one worker."""
        self.check_rank(rank)
        result: R = await self._invoke(rank, method.__name__, args, kwargs)
        return result

    def check_rank(self, rank: int) -> None:
        """Raise FatalError when the group has no such rank."""
        if not 0 <= rank < self.world_size:
            raise FatalError(f"group {self.request.name} has ranks 0 to {self.world_size - 1}, got {rank}")

    def label(self, rank: int) -> str:
        """The worker's name in messages."""
        return f"worker {self.request.name}[{rank}]"

    def overdue(self, rank: int, method: str, seconds: float) -> InfraError:
        """The error of a call that passed its deadline."""
        return InfraError(
            f"{self.label(rank)} did not finish {method} within {seconds:g} s; it is still busy with it: "
            "restart the worker, or raise cluster.call_timeout_s"
        )

    def closed(self, rank: int, method: str) -> InfraError:
        """The error of a call on a closed group."""
        return InfraError(f"{self.label(rank)} cannot take {method}: its group is closed")

    def _share(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Prepare arguments that several workers get; a group that copies per call stores them once here."""
        return arguments

    @abstractmethod
    async def _invoke(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call one worker; raise InfraError for its death or deadline, and its own error otherwise."""
