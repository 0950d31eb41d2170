"""A sharded trainer with a reader on every rank; what a rank runs (see tests.support.gloo_ranks)."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rl.core.errors import WeightSyncError
from rl.weights.boxes import chunks
from rl.weights.native import digests_of
from rl.weights.receiver import InPlace, WeightReceiver
from rl.weights.sender import TrainerRank, WeightSender
from rl.weights.shards import Part, ShardedSource
from rl.weights.transport import LinkSettings, OpenRequest, RefitStart, TransferInfo
from tests.support.gloo_ranks import default_maker

TIMEOUT_S = 60.0
WIDTH = 512
NUM_LAYERS = 96
BUCKET_BYTES = WIDTH * WIDTH * 4


class Stack(nn.Module):
    """Some square layers, an odd one, a norm, and an output layer that is tied to the embedding."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.odd = nn.Linear(width, 7)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 37, bias=False)
        self.head.weight = self.embed.weight


def make_stack(width: int, num_layers: int) -> Stack:
    torch.manual_seed(3)
    return Stack(width, num_layers)


def shards_of(kind: str, module: Stack, rank: int, size: int) -> dict[str, Any]:
    """The parameters of a rank, spread in one of several ways."""
    mesh = init_device_mesh("cpu", (size,))
    if kind == "fsdp":
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        return dict(fully_shard(module, mesh=mesh).named_parameters())
    if kind == "fsdp and tp":  # what is not split by the second lies on a part of the mesh alone
        grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, grid["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        return dict(fully_shard(module, mesh=grid["dp"]).named_parameters())
    found: dict[str, Any] = {}
    if kind == "grid":
        grid = init_device_mesh("cpu", (size // 2, 2))
        spread = ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()])
        for number, (name, parameter) in enumerate(module.named_parameters()):
            found[name] = distribute_tensor(parameter.detach(), grid, spread[number % len(spread)])
        return found
    for name, parameter in module.named_parameters():
        axis = 1 if parameter.dim() == 2 and ".1" in name else 0
        if kind == "dtensor":
            found[name] = distribute_tensor(parameter.detach(), mesh, [Shard(axis)])
        else:
            extents = chunks(parameter.shape[axis], size)
            local = parameter.detach().narrow(axis, sum(extents[:rank]), extents[rank]).clone()
            found[name] = Part(local, axis, extents)
    return found


def refit_of_a_sharded_trainer(
    rank: int, kind: str, num_roots: int, dtype_name: str, channel: str, width: int, num_layers: int
) -> dict[str, Any]:
    """Two refits; every rank is also a reader. Returns what was sent and held, and how much memory it took."""
    size = torch.distributed.get_world_size()
    whole = make_stack(width, num_layers)
    names = [name for name, _ in whole.named_parameters()]
    dtype: torch.dtype = vars(torch)[dtype_name]
    expected = digests_of([parameter.detach().to(dtype).contiguous() for parameter in whole.parameters()])
    targets = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in whole.named_parameters()}
    for target in targets.values():
        target.fill_(1)  # its pages are there before anything is measured
    shards = shards_of(kind, whole, rank, size)
    del whole
    source = ShardedSource(lambda: shards, rank, size, default_maker(rank, size), dtype)
    sender = WeightSender(source, TrainerRank(rank, size, name=f"policy[{rank}]"))
    assert [spec.name for spec in sender.manifest()] == names
    receiver = WeightReceiver(InPlace(targets), f"generation[{rank}]")
    _connect(rank, size, sender, receiver, channel, num_roots)
    growth = []
    for epoch in (1, 2):
        reset_peak()
        before = memory_kib("VmRSS")
        report = _refit(sender, receiver, RefitStart(epoch, epoch, TIMEOUT_S))
        growth.append(memory_kib("VmHWM") - before)
        received = receiver.finish()
    receiver.close()
    sender.close()
    held = digests_of(list(targets.values()))
    return {
        "sent": report.digests,
        "bytes": report.num_bytes,
        "received": received.digests,
        "held": held,
        "expected": expected,
        "growth_kib": max(growth),
    }


class Stopping(ShardedSource):
    """Stops its process (SIGSTOP) before a collective of a refit, once."""

    may_stop = False

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        if self.may_stop:
            self.may_stop = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().tensors(indices, root)


def refit_with_a_stopped_rank(rank: int, channel: str, timeout_s: float) -> dict[str, Any]:
    """Rank 1 stops in the first refit, until rank 0's has ended; then all try again with new links."""
    size = torch.distributed.get_world_size()
    whole = make_stack(96, 5)
    expected = digests_of(list(whole.parameters()))
    targets = {name: torch.zeros(parameter.shape) for name, parameter in whole.named_parameters()}
    shards = shards_of("grid", whole, rank, size)
    source = Stopping(lambda: shards, rank, size, default_maker(rank, size))
    sender = WeightSender(source, TrainerRank(rank, size, name=f"policy[{rank}]"))
    receiver = WeightReceiver(InPlace(targets), f"generation[{rank}]")
    pids: list[Any] = [None] * size
    torch.distributed.all_gather_object(pids, os.getpid())
    _connect(rank, size, sender, receiver, f"{channel}-1", 0)
    source.may_stop = rank == 1
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        start = RefitStart(1, 1, timeout_s)
        receiver.start(start)
        reading = pool.submit(receiver.update)
        try:
            sent: object = sender.send(start)
        except WeightSyncError as error:
            sent = error
        seconds = time.monotonic() - begin
        received = reading.exception()
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    _connect(rank, size, sender, receiver, f"{channel}-2", 0)
    _refit(sender, receiver, RefitStart(2, 1, TIMEOUT_S))
    receiver.finish()
    receiver.close()
    sender.close()
    errors = [error if isinstance(error, WeightSyncError) else repr(error) for error in (sent, received)]
    return {"errors": errors, "seconds": seconds, "held": digests_of(list(targets.values())), "expected": expected}


def _connect(
    rank: int, size: int, sender: WeightSender, receiver: WeightReceiver, channel: str, num_roots: int
) -> None:
    readers = tuple(f"generation[{number}]" for number in range(size))
    request = OpenRequest(
        "shm", channel, BUCKET_BYTES, 2, readers, TIMEOUT_S, LinkSettings(TIMEOUT_S, host="127.0.0.1"), num_roots
    )
    planned: list[Any] = [sender.plan(request) if rank == 0 else None]
    torch.distributed.broadcast_object_list(planned)
    plan, digest = planned[0]
    addresses: list[Any] = [None] * size
    torch.distributed.all_gather_object(addresses, sender.open(plan, digest, request))
    roots = tuple(address for address in addresses if address)
    info = TransferInfo("shm", roots, plan, digest, 2, readers, TIMEOUT_S, request.link)
    reading = threading.Thread(target=receiver.init, args=(info, rank))
    reading.start()
    sender.join()
    reading.join(TIMEOUT_S)


def _refit(sender: WeightSender, receiver: WeightReceiver, start: RefitStart) -> Any:
    receiver.start(start)
    reading = threading.Thread(target=receiver.update)
    reading.start()
    report = sender.send(start)
    reading.join(TIMEOUT_S)
    return report


def reset_peak() -> None:
    """Let the kernel forget the peak of this process's resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_kib(field: str) -> int:
    """A field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])
