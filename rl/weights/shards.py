"""Weights that are spread over trainer ranks: each rank's parts are brought together one bucket at a time.

All parts of one request cross in one message per rank, already in their wire dtype, and only to the rank that sends
them. It holds whole only what was asked for; whoever asks goes bucket by bucket. Kinds of parts:

    Tensor     every rank has it whole
    DTensor    of torch.distributed: FSDP2, tensor parallelism, or both
    Part       a plain tensor that is this rank's slice along one axis
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rl.core.errors import WeightSyncError
from rl.weights.manifest import num_bytes, torch_dtype, wire_dtype
from rl.weights.source import check_agreed
from rl.weights.transport import TensorSpec

# Parts begin at multiples of it in a message, so that they can be viewed as any dtype.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Part:
    """This rank's slice of a tensor.

    Attributes:
        local: The slice.
        dim: The axis.
        extents: How much of the axis each rank has, in rank order, which is also the order in the tensor.
    """

    local: Tensor
    dim: int
    extents: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.shape_of(sum(self.extents))

    def shape_of(self, extent: int) -> tuple[int, ...]:
        """Of a slice."""
        shape = list(self.local.shape)
        shape[self.dim] = extent
        return tuple(shape)


class ShardedSource:
    """Tensors over the ranks of a process group.

    Args:
        named_parts: Called at every refit; the same names, in the same order, on every rank.
        group: Of all trainer ranks; collectives of this source alone, so that a failed refit breaks nothing else.
        dtype: Of floating-point tensors on the wire; None = each its own.
    """

    def __init__(
        self,
        named_parts: Callable[[], Mapping[str, Tensor | Part]],
        group: c10d.ProcessGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._named_parts = named_parts
        self._group = group
        self._dtype = dtype
        self._agreed: tuple[TensorSpec, ...] | None = None
        self._parts: list[Tensor | Part] = []
        self._device = torch.device("cpu")
        self._deadline = 0.0

    @property
    def is_sharded(self) -> bool:
        """True."""
        return True

    @property
    def holds_tensors(self) -> bool:
        """False: whole tensors are made."""
        return False

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the whole tensors in wire order; no collective."""
        parts = self._named()
        self._device = next((_local(part).device for part in parts.values()), self._device)
        self._agreed = self._specs(parts)
        return self._agreed

    def begin(self, timeout_s: float) -> None:
        """Take the parts as they are now; see `WeightSource.begin`."""
        self._deadline = time.monotonic() + timeout_s
        parts = self._named()
        check_agreed(self._agreed, self._specs(parts))
        self._parts = list(parts.values())

    def agree(self, is_well: bool) -> bool:
        """Return whether all ranks are well; a collective."""
        flag = torch.tensor([int(is_well)], dtype=torch.int32, device=self._device)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN
        self._wait("agreeing to go on", options, lambda: self._group.allreduce([flag], options))
        return bool(flag.item())

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        """Return whole tensors in their wire dtype; a collective, see `WeightSource.tensors`."""
        assert self._agreed is not None
        specs = [self._agreed[index] for index in indices]
        found = [self._prepared(self._parts[index], spec) for index, spec in zip(indices, specs, strict=True)]
        parts = [part for part in found if isinstance(part, Part)]
        gathered = iter(self._gathered(parts, root) if parts else ())
        if root not in (None, self._group.rank()):
            return []
        return [next(gathered) if isinstance(part, Part) else part for part in found]

    def end(self) -> None:
        """Forget the parts."""
        self._parts = []

    def _named(self) -> dict[str, Tensor | Part]:
        named: dict[str, Tensor | Part] = {}
        seen: set[object] = set()
        for name, part in self._named_parts().items():
            place = _place(part)
            if place not in seen:  # a tied weight travels once
                named[name] = self._as_part(name, part)
            seen.add(place)
        return named

    def _as_part(self, name: str, part: Tensor | Part) -> Tensor | Part:
        size, rank = self._group.size(), self._group.rank()
        if isinstance(part, DTensor):
            placements = part.placements
            if part.device_mesh.ndim != 1 or type(placements[0]) is not Shard or part.device_mesh.size() != size:
                return part.detach()
            dim = placements[0].dim % part.dim()
            part = Part(_local(part), dim, chunks(part.shape[dim], size))
        if isinstance(part, Part) and (len(part.extents) != size or part.local.shape[part.dim] != part.extents[rank]):
            raise WeightSyncError(
                f"rank {rank} of {size} has a part of shape {list(part.local.shape)} of '{name}'; along axis "
                f"{part.dim} the ranks should have {list(part.extents)}"
            )
        return part

    def _specs(self, parts: Mapping[str, Tensor | Part]) -> tuple[TensorSpec, ...]:
        specs = []
        for name, part in parts.items():
            local = part.local if isinstance(part, Part) else part
            dtype = str(wire_dtype(local, self._dtype)).removeprefix("torch.")
            specs.append(TensorSpec(name, dtype, tuple(part.shape)))
            num_bytes(specs[-1])
        return tuple(specs)

    def _prepared(self, part: Tensor | Part, spec: TensorSpec) -> Tensor | Part:
        """The part in its wire dtype; whole where torch itself must bring it together."""
        dtype = torch_dtype(spec)
        if isinstance(part, Part):
            return Part(part.local.detach().to(dtype), part.dim, part.extents)
        if isinstance(part, DTensor):
            return self._full(part, dtype)
        return part.detach().contiguous()

    def _full(self, part: Any, dtype: torch.dtype) -> Tensor:
        try:
            whole: Tensor = part.to(dtype).full_tensor()
        except RuntimeError as error:
            raise self._lost("gathering", error) from error
        return whole.contiguous()

    def _gathered(self, parts: Sequence[Part], root: int | None) -> list[Tensor]:
        """One message of every rank, each as long as the longest; the receivers of it cut it up."""
        size, rank = self._group.size(), self._group.rank()
        offsets = [_offsets(parts, number) for number in range(size)]
        message = torch.empty(max(ends[-1] for ends in offsets), dtype=torch.uint8, device=parts[0].local.device)
        for part, begin in zip(parts, offsets[rank], strict=False):
            flat = part.local.contiguous().reshape(-1)
            if flat.numel():
                message[begin : begin + flat.nbytes] = flat.view(torch.uint8)
        received = self._exchange(message, root)
        return (
            [
                torch.cat(
                    [_slice_of(part, received[number], offsets[number][place], number) for number in range(size)],
                    part.dim,
                )
                for place, part in enumerate(parts)
            ]
            if received
            else []
        )

    def _exchange(self, message: Tensor, root: int | None) -> list[Tensor]:
        size, rank = self._group.size(), self._group.rank()
        is_taker = root is None or root == rank
        received = [torch.empty_like(message) for _ in range(size)] if is_taker else []
        if root is None:
            options: Any = c10d.AllgatherOptions()
            self._wait("gathering", options, lambda: self._group.allgather([received], [message], options))
        else:
            options = c10d.GatherOptions()
            options.rootRank = root
            outputs = [received] if is_taker else []
            self._wait("gathering", options, lambda: self._group.gather(outputs, [message], options))
        return received

    def _wait(self, what: str, options: Any, begin: Callable[[], Any]) -> None:
        options.timeout = timedelta(seconds=max(0.001, self._deadline - time.monotonic()))
        try:
            begin().wait()
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> WeightSyncError:
        return WeightSyncError(
            f"trainer rank {self._group.rank()} of {self._group.size()} failed at {what} for a refit: {error}; "
            "another rank has died or hangs, see its output"
        )


def chunks(extent: int, size: int) -> tuple[int, ...]:
    """How torch.distributed spreads an axis over ranks: equal parts rounded up, the last ones shorter or empty."""
    step = -(-extent // size)
    return tuple(max(0, min(step, extent - step * rank)) for rank in range(size))


def _place(part: Tensor | Part) -> object:
    """What the names of one tied tensor have in common; a rank with none of it must judge as the others do."""
    local = _local(part)
    return (local.data_ptr(), tuple(part.shape), local.stride()) if local.numel() else id(part)


def _local(part: Tensor | Part) -> Tensor:
    if isinstance(part, Part):
        return part.local
    if isinstance(part, DTensor):
        dtensor: Any = part.detach()
        return torch.as_tensor(dtensor.to_local())
    return part


def _offsets(parts: Sequence[Part], rank: int) -> list[int]:
    """Where a rank's parts begin in its message, and where the last one ends."""
    offsets = [0]
    for part in parts:
        count = 1
        for extent in part.shape_of(part.extents[rank]):
            count *= extent
        end = offsets[-1] + count * part.local.itemsize
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _slice_of(part: Part, message: Tensor, begin: int, rank: int) -> Tensor:
    shape = part.shape_of(part.extents[rank])
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return part.local.new_empty(shape)
    return message[begin : begin + count * part.local.itemsize].view(part.local.dtype).view(shape)
