"""Ranks with a gloo group over the loopback: as threads of this process, or as processes of their own.

results = in_threads(2, lambda rank, make_group: ...)
makers = group_makers(2)        # one per rank; all of them are called, each on a thread, with the same name
results = in_processes(2, module_level_function, argument)
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed

from rl.cluster.rendezvous import serve_store
from rl.weights.shards import MakeGroup

T = TypeVar("T")
TIMEOUT_S = 60.0


def in_threads(world_size: int, function: Callable[[int, MakeGroup], T]) -> list[T]:
    """Run `function(rank, make_group)` on a thread per rank; results in rank order."""
    makers = group_makers(world_size)
    groups = []  # none closes while another rank is not through

    def run(rank: int) -> T:
        def make_group(name: str, timeout_s: float) -> Any:
            groups.append(makers[rank](name, timeout_s))
            return groups[-1]

        return function(rank, make_group)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def group_makers(world_size: int) -> list[MakeGroup]:
    """What makes the group of a set of links, for each rank of this process."""
    store, address = serve_store("127.0.0.1")
    port = int(address.rpartition(":")[2])

    def maker(rank: int) -> MakeGroup:
        client = c10d.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT_S))

        def make_group(name: str, timeout_s: float) -> Any:
            assert store.port == port  # and it lives as long as the makers
            return gloo_group(c10d.PrefixStore(name, client), rank, world_size, timeout_s)

        return make_group

    return [maker(rank) for rank in range(world_size)]


def default_maker(rank: int, world_size: int) -> MakeGroup:
    """The same in a process of `in_processes`; the ranks find each other as those of the default group did."""
    store = torch.distributed.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    return lambda name, timeout_s: gloo_group(c10d.PrefixStore(name, store), rank, world_size, timeout_s)


def gloo_group(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """A group over the loopback, which asks no resolver."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, world_size, options)


def in_processes(
    world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = 120.0
) -> list[Any]:
    """Run `function(rank, *arguments)` in a process per rank, each with torch.distributed's default group of gloo.

    Raises:
        AssertionError: a rank failed, with its traceback, or did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tdm-ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            target = (str(Path(folder) / "store"), rank, world_size, theirs, function, arguments)
            processes.append(context.Process(target=_serve_rank, args=target, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return [_result_of(rank, pipe, deadline_s) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _result_of(rank: int, pipe: Connection, deadline_s: float) -> Any:
    assert pipe.poll(deadline_s), f"rank {rank} did not end within {deadline_s:g} s"
    try:
        is_well, value = pipe.recv()
    except EOFError as error:
        raise AssertionError(f"rank {rank} died") from error
    assert is_well, f"rank {rank} failed:\n{value}"
    return value


def _serve_rank(
    store: str, rank: int, world_size: int, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        outcome = (True, function(rank, *arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send(outcome)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
