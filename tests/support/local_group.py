"""A WorkerGroup in this process: workers are plain objects, calls run in threads. No processes, no restarts."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.cluster.worker_group import WorkerContext, WorkerRequest
from rl.core.errors import InfraError


class InProcessGroup:
    """Workers that live in the test's own process."""

    def __init__(self, workers: list[Any], request: WorkerRequest) -> None:
        self.workers = workers
        self.request = request
        self._pool = ThreadPoolExecutor(request.concurrency, thread_name_prefix=request.name)

    @property
    def world_size(self) -> int:
        return len(self.workers)

    async def broadcast(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return list(
            await asyncio.gather(*(self.call(rank, method, *args, **kwargs) for rank in range(self.world_size)))
        )

    async def scatter(self, method: Callable[..., Any], shards: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        calls = [self.call(rank, method, shard, *args, **kwargs) for rank, shard in enumerate(shards)]
        return list(await asyncio.gather(*calls))

    async def call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, lambda: method(self.workers[rank], *args, **kwargs))
        try:
            return await asyncio.wait_for(work, self.request.call_timeout_s)
        except TimeoutError as error:
            raise InfraError(f"{self.request.name}[{rank}] {method.__name__} was late") from error

    async def check_health(self) -> list[bool]:
        return [True] * self.world_size

    async def restart(self, rank: int) -> None:
        raise InfraError("this group restarts nobody")

    async def close(self) -> None:
        self._pool.shutdown(wait=False)


class InProcessCluster:
    """Starts InProcessGroups."""

    def __init__(self, run_tag: str) -> None:
        self.run_tag = run_tag
        self.groups: list[InProcessGroup] = []

    async def start_workers(
        self, worker_class: Callable[..., Any], request: WorkerRequest, *args: Any, **kwargs: Any
    ) -> InProcessGroup:
        contexts = [
            WorkerContext(request.name, rank, request.num_workers, rank, "", "cpu", request.num_threads, self.run_tag)
            for rank in range(request.num_workers)
        ]
        workers = [await asyncio.to_thread(worker_class, context, *args, **kwargs) for context in contexts]
        group = InProcessGroup(workers, request)
        self.groups.append(group)
        return group

    async def shutdown(self) -> None:
        for group in self.groups:
            await group.close()
