"""Weights that are spread over trainer ranks: each rank's parts are brought together one bucket at a time.

All parts of one request cross in one message per rank, already in their wire dtype, and only to the rank that sends
them. It holds whole only what was asked for; whoever asks goes bucket by bucket. Kinds of parts:

    Tensor     every rank has it whole
    DTensor    of torch.distributed: FSDP2, tensor parallelism, or both
    Part       a plain tensor that is this rank's slice along one axis

The ranks meet in a group of this source's own: a refit that fails leaves the trainer's groups as they were, and the
next set of links has a new one, since a group in which a rank was late is of no more use. There they tell each other
once which box of each tensor they have, so that no layout of the ranks needs to be known here.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.core.errors import WeightSyncError, first_line
from rl.weights.boxes import Box, box_of, boxes_along, read_boxes, sent_boxes
from rl.weights.manifest import spec_of, torch_dtype
from rl.weights.source import check_agreed
from rl.weights.transport import TensorSpec

# Makes the group of a set of links: its name, which no other set has, and the seconds in which all ranks must be there.
MakeGroup = Callable[[str, float], c10d.ProcessGroup]
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
        return tuple(sum(self.extents) if axis == self.dim else n for axis, n in enumerate(self.local.shape))


@dataclass(frozen=True)
class _Held:
    """What this rank has of a tensor."""

    local: Tensor
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class _Spread:
    """A tensor in boxes: this rank's, and where those that the ranks send lie in the whole."""

    local: Tensor
    shape: tuple[int, ...]
    sent: tuple[Box | None, ...]


class ShardedSource:
    """Tensors over the ranks of a trainer.

    Args:
        named_parts: Called at every refit; the same names, in the same order, on every rank.
        rank: Of this process.
        size: Trainer ranks.
        make_group: For collectives of this source alone. Raises RuntimeError when not all ranks show up in time.
        dtype: Of floating-point tensors on the wire; None = each its own.
    """

    def __init__(
        self,
        named_parts: Callable[[], Mapping[str, Tensor | Part]],
        rank: int,
        size: int,
        make_group: MakeGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._named_parts = named_parts
        self._rank = rank
        self._size = size
        self._make_group = make_group
        self._group: c10d.ProcessGroup | None = None
        self._dtype = dtype
        self._agreed: tuple[TensorSpec, ...] | None = None
        self._parts: list[_Held] = []
        self._own: list[Box] = []  # as the others know them
        self._sent: list[tuple[Box | None, ...] | None] = []  # by tensor and rank; None where every rank has it whole
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
        self._device = next((part.local.device for part in parts.values()), self._device)
        self._agreed = self._specs(parts)
        return self._agreed

    def connect(self, name: str, timeout_s: float) -> None:
        """Meet the other ranks in a new group; see `WeightSource.connect`."""
        self.leave()
        self._own, self._sent = [], []
        try:
            self._group = self._make_group(name, timeout_s)
        except RuntimeError as error:
            raise self._lost(f"meeting the others within {timeout_s:g} s", error) from error

    def begin(self, timeout_s: float) -> None:
        """Take the parts as they are now; see `WeightSource.begin`."""
        self._deadline = time.monotonic() + timeout_s
        parts = self._named()
        check_agreed(self._agreed, self._specs(parts))
        for index, (name, part) in enumerate(parts.items()):
            if self._own and part.box != self._own[index]:
                raise WeightSyncError(
                    f"trainer rank {self._rank} of {self._size} has {part.box} of '{name}', but {self._own[index]} "
                    "when it met the others; open the links again"
                )
        self._parts = list(parts.values())

    def agree(self, is_well: bool) -> bool:
        """Return whether all ranks are well; a collective."""
        flag = torch.tensor([int(is_well)], dtype=torch.int32, device=self._device)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN
        self._wait("agreeing to go on", options, lambda: self._joined().allreduce([flag], options))
        return bool(flag.item())

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        """Return whole tensors in their wire dtype; a collective, see `WeightSource.tensors`."""
        assert self._agreed is not None
        if not self._own:
            self._tell_boxes()
        found = [self._prepared(index, self._agreed[index]) for index in indices]
        spread = [part for part in found if isinstance(part, _Spread)]
        gathered = iter(self._gathered(spread, root) if spread else ())
        if root not in (None, self._rank):
            return []
        return [next(gathered) if isinstance(part, _Spread) else part for part in found]

    def end(self) -> None:
        """Forget the parts."""
        self._parts = []

    def leave(self) -> None:
        """Drop the group, which closes its connections; see `WeightSource.leave`."""
        self._group = None

    def _named(self) -> dict[str, _Held]:
        named: dict[str, _Held] = {}
        seen: set[object] = set()
        for name, part in self._named_parts().items():
            place = _place(part)
            if place not in seen:  # a tied weight travels once
                named[name] = self._held(name, part)
            seen.add(place)
        return named

    def _held(self, name: str, part: Tensor | Part) -> _Held:
        local, shape = _local(part), tuple(part.shape) if isinstance(part, Tensor) else part.shape
        box = Box((0,) * len(shape), shape)
        if isinstance(part, DTensor):
            box = _box_in_mesh(name, part)
        elif isinstance(part, Part):
            if len(part.extents) != self._size:
                raise WeightSyncError(f"'{name}' has extents for {len(part.extents)} ranks, the trainer {self._size}")
            box = boxes_along(shape, part.dim, part.extents)[self._rank]
        if tuple(local.shape) != box.shape:
            raise WeightSyncError(
                f"rank {self._rank} of {self._size} has a part of shape {list(local.shape)} of '{name}' {list(shape)}; "
                f"as it is spread it should have {list(box.shape)}"
            )
        return _Held(local, shape, box)

    def _specs(self, parts: Mapping[str, _Held]) -> tuple[TensorSpec, ...]:
        return tuple(spec_of(name, part.local, part.shape, self._dtype) for name, part in parts.items())

    def _tell_boxes(self) -> None:
        """Let every rank know the boxes of all: a collective, once for a set of links.

        Raises:
            WeightSyncError: together they are not the whole tensor; names it. The same on every rank.
        """
        assert self._agreed is not None
        own = [part.box for part in self._parts]
        numbers = torch.tensor([n for box in own for n in (*box.start, *box.shape)], dtype=torch.int64)
        tables = self._exchange(numbers.to(self._device), None)
        of_ranks = [read_boxes(table.tolist(), [len(spec.shape) for spec in self._agreed]) for table in tables]
        sent: list[tuple[Box | None, ...] | None] = []
        for spec, boxes in zip(self._agreed, zip(*of_ranks, strict=True), strict=True):
            found = sent_boxes(boxes)
            covered = sum(box.numel for box in found if box is not None)
            if covered != math.prod(spec.shape):
                raise WeightSyncError(
                    f"the parts of all ranks have {covered} numbers of '{spec.name}' {list(spec.shape)}, not "
                    f"{math.prod(spec.shape)}: {', '.join(map(str, boxes))}"
                )
            sent.append(None if all(box.shape == spec.shape for box in boxes) else found)
        self._own, self._sent = own, sent

    def _prepared(self, index: int, spec: TensorSpec) -> Tensor | _Spread:
        """The part in its wire dtype; a whole tensor as it is."""
        part, sent = self._parts[index], self._sent[index]
        if sent is None:
            return part.local.detach().contiguous()
        return _Spread(part.local.detach().to(torch_dtype(spec)), part.shape, sent)

    def _gathered(self, parts: Sequence[_Spread], root: int | None) -> list[Tensor]:
        """One message of every rank, each as long as the longest; whoever receives it cuts it up."""
        offsets = [_offsets(parts, number) for number in range(self._size)]
        message = torch.empty(max(ends[-1] for ends in offsets), dtype=torch.uint8, device=parts[0].local.device)
        for part, begin in zip(parts, offsets[self._rank], strict=False):
            if part.sent[self._rank] is not None:
                flat = part.local.contiguous().reshape(-1).view(torch.uint8)
                message[begin : begin + flat.numel()] = flat
        received = self._exchange(message, root)
        if not received:
            return []
        wholes = []
        for place, part in enumerate(parts):
            whole = torch.empty(part.shape, dtype=part.local.dtype, device=part.local.device)
            for number, box in enumerate(part.sent):
                if box is not None:
                    _cut(whole, box).copy_(_read(part, box, received[number], offsets[number][place]))
            wholes.append(whole)
        return wholes

    def _exchange(self, message: Tensor, root: int | None) -> list[Tensor]:
        is_taker = root in (None, self._rank)
        received = [torch.empty_like(message) for _ in range(self._size)] if is_taker else []
        if root is None:
            options: Any = c10d.AllgatherOptions()
            self._wait("gathering", options, lambda: self._joined().allgather([received], [message], options))
        else:
            options = c10d.GatherOptions()
            options.rootRank = root
            outputs = [received] if is_taker else []
            self._wait("gathering", options, lambda: self._joined().gather(outputs, [message], options))
        return received

    def _wait(self, what: str, options: Any, begin: Callable[[], Any]) -> None:
        options.timeout = timedelta(seconds=max(0.001, self._deadline - time.monotonic()))
        try:
            begin().wait()
        except RuntimeError as error:
            self.leave()  # it can carry nothing more, and the others need not wait for this rank
            raise self._lost(what, error) from error

    def _joined(self) -> c10d.ProcessGroup:
        if self._group is None:
            raise WeightSyncError(
                f"trainer rank {self._rank} of {self._size} is in no group: it has not met the others, or has left them"
            )
        return self._group

    def _lost(self, what: str, error: RuntimeError) -> WeightSyncError:
        return WeightSyncError(
            f"trainer rank {self._rank} of {self._size} failed at {what} for a refit: {first_line(error)}; "
            "another rank has died, hangs or gave up, see its own error and output"
        )


def _place(part: Tensor | Part) -> object:
    """What the names of one tied tensor have in common; a rank with none of it must judge as the others do."""
    local = _local(part)
    return (local.data_ptr(), tuple(local.shape), local.stride()) if local.numel() else id(part)


def _local(part: Tensor | Part) -> Tensor:
    if isinstance(part, Part):
        return part.local
    if isinstance(part, DTensor):
        dtensor: Any = part.detach()
        return torch.as_tensor(dtensor.to_local())
    return part


def _box_in_mesh(name: str, part: DTensor) -> Box:
    mesh = part.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightSyncError(
            f"'{name}' lies on ranks {mesh.mesh.tolist()} and not here; a refit needs it on every rank"
        )
    try:
        return box_of(tuple(part.shape), tuple(mesh.shape), tuple(coordinate), part.placements)
    except WeightSyncError as error:
        raise WeightSyncError(f"'{name}' cannot be sent: {error}") from error


def _offsets(parts: Sequence[_Spread], rank: int) -> list[int]:
    """Where a rank's boxes begin in its message, and where the last one ends."""
    offsets = [0]
    for part in parts:
        box = part.sent[rank]
        end = offsets[-1] + (0 if box is None else box.numel * part.local.itemsize)
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _cut(whole: Tensor, box: Box) -> Tensor:
    for axis, (start, extent) in enumerate(zip(box.start, box.shape, strict=True)):
        whole = whole.narrow(axis, start, extent)
    return whole


def _read(part: _Spread, box: Box, message: Tensor, begin: int) -> Tensor:
    return message[begin : begin + box.numel * part.local.itemsize].view(part.local.dtype).view(box.shape)
