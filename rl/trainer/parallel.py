"""Data parallelism: add gradient sums over ranks. It averages nothing: the division by global counts comes later.

The process group belongs to one object and not to the process, so that several workers can live in one process.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from rl.cluster.rendezvous import connect_store
from rl.cluster.worker_group import WorkerContext
from rl.core.errors import InfraError

_BUCKET_ELEMENTS = 16 * 2**20


class GradientSum:
    """Sums tensors over the ranks of a worker group; with one rank it does nothing."""

    def __init__(self, context: WorkerContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._group = _join(context, timeout_s) if context.world_size > 1 else None

    def add_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; every rank must call with the same shapes.

        Raises:
            InfraError: a rank did not take part within the deadline.
        """
        if self._group is None:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            try:
                self._group.allreduce([flat]).wait()
            except RuntimeError as error:
                raise InfraError(
                    f"gradient sum of {self._context.name} rank {self._context.rank} of {self._context.world_size} "
                    f"failed (deadline {self._timeout_s} s): {error}; another rank has died or hangs, see its output"
                ) from error
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _join(context: WorkerContext, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    try:
        keys = c10d.PrefixStore(context.name, connect_store(context, timeout_s))
        if context.device.startswith("cuda"):
            nccl: Any = c10d.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return c10d.ProcessGroupNCCL(keys, context.rank, context.world_size, nccl)
        gloo: Any = c10d.ProcessGroupGloo  # torch's stubs lack its options
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=_own_address(context.rendezvous))]
        return gloo(keys, context.rank, context.world_size, options)
    except (RuntimeError, OSError) as error:
        raise InfraError(
            f"{context.name} rank {context.rank} of {context.world_size} cannot meet the others at "
            f"'{context.rendezvous}' within {timeout_s} s: {error}"
        ) from error


def _own_address(rendezvous: str) -> str:
    """Return this host's address on the network of the rendezvous.

    Left to itself, gloo looks its own host name up, which takes seconds where the resolver is slow and may give an
    address that the other ranks cannot reach.
    """
    host, _, port = rendezvous.rpartition(":")
    host = host.strip("[]")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group neighbours of one dtype into buckets of about 16 million elements: fewer, larger messages."""
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        fits = buckets and buckets[-1][0].dtype == tensor.dtype and size + tensor.numel() <= _BUCKET_ELEMENTS
        if fits:
            buckets[-1].append(tensor)
            size += tensor.numel()
        else:
            buckets.append([tensor])
            size = tensor.numel()
    return buckets
