"""A trainer of several processes that each hold a share of the weights: every rank is a root of the refit.

The product's worker with another source; it does not train.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from rl.cluster.rendezvous import connect_store
from rl.cluster.worker_group import WorkerContext
from rl.trainer.config import PolicySettings
from rl.trainer.request import PolicyRequest
from rl.trainer.worker import PolicyWorker
from rl.weights.boxes import chunks
from rl.weights.sender import TrainerRank, WeightSender
from rl.weights.shards import Part, ShardedSource
from tests.support.gloo_ranks import gloo_group


class _KeptSource(ShardedSource):
    """Keeps what it gathered until the refit is over.

    Links over NCCL read tensors later than they are given. Memory of a device is freed in the order of its streams;
    that of a host, on which the strict NCCL works, at once.
    """

    kept: list[Tensor]

    def begin(self, timeout_s: float) -> None:
        self.kept = []
        super().begin(timeout_s)

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        found = super().tensors(indices, root)
        self.kept += found
        return found

    def end(self) -> None:
        self.kept = []
        super().end()


class ShardedPolicyWorker(PolicyWorker):
    """Offers its rows of every tensor."""

    def __init__(self, context: WorkerContext, settings: PolicySettings, request: PolicyRequest) -> None:
        super().__init__(context, settings, request)
        rank, size = context.rank, context.world_size
        source = _KeptSource(self._rows, rank, size, self._meet, torch.float32)
        self._sender = WeightSender(source, TrainerRank(rank, size, name=f"{context.name}[{rank}]"))

    def change(self, version: int) -> None:
        """Hold other weights, the same on every rank, as `version`."""
        generator = torch.Generator().manual_seed(version + 100)
        with torch.no_grad():
            for tensor in self._model.named_tensors().values():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02)
        self._version = version

    def pid(self) -> int:
        """Number of the process."""
        return os.getpid()

    def whole(self) -> dict[str, Tensor]:
        """What every engine should have."""
        return {name: tensor.detach().clone() for name, tensor in self._model.named_tensors().items()}

    def _rows(self) -> dict[str, Part]:
        rank, size = self._context.rank, self._context.world_size
        parts = {}
        for name, tensor in self._model.named_tensors().items():
            extents = chunks(tensor.shape[0], size)
            parts[name] = Part(tensor.detach().narrow(0, sum(extents[:rank]), extents[rank]), 0, extents)
        return parts

    def _meet(self, name: str, timeout_s: float) -> Any:
        store = c10d.PrefixStore(name, connect_store(self._context, timeout_s))
        return gloo_group(store, self._context.rank, self._context.world_size, timeout_s)
