"""A generator's end of a refit: takes buckets out of the ring and hands whole tensors to a loader.

Engine-neutral and synchronous; an engine's own adapter calls it. Order: init, then per refit start, update(0..n-1),
finish; close at the end. A refit that was given up needs no call: the next start begins anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from rl.core.errors import WeightSyncError
from rl.weights.host import SharedRing
from rl.weights.manifest import num_bytes, torch_dtype
from rl.weights.plan import BucketPlan, Piece, check_plan
from rl.weights.transport import TransferInfo

LoadTensors = Callable[[list[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True)
class Received:
    """What one refit delivered: whole tensors, their bytes, and the checksum over the bytes in wire order."""

    num_tensors: int
    num_bytes: int
    checksum: str


class WeightReceiver:
    """Receives into `load`.

    Args:
        load: Called once per bucket with the tensors that this bucket completed, in wire order.
        keeps_tensors: Whether `load` may keep its tensors beyond the call. They are copied then; otherwise whole
            tensors are views of the slot, which the next bucket but one overwrites.
    """

    def __init__(self, load: LoadTensors, keeps_tensors: bool) -> None:
        self._load = load
        self._keeps_tensors = keeps_tensors
        self._info: TransferInfo | None = None
        self._plan: BucketPlan | None = None
        self._ring: SharedRing | None = None
        self._partial: torch.Tensor | None = None
        self._digest = xxhash.xxh3_64()
        self._next_bucket = 0
        self._num_tensors = 0

    def init(self, info: TransferInfo) -> None:
        """Attach to the ring.

        Raises:
            WeightSyncError: the plan differs from the driver's, or the ring is not on this host.
        """
        plan = check_plan(info)
        self.close()
        self._ring = SharedRing.attach(info.channel, info.bucket_bytes, info.num_slots)
        self._info, self._plan = info, plan

    def start(self) -> None:
        """Begin a refit; whatever was left of an earlier one is forgotten."""
        if self._plan is None:
            raise WeightSyncError("refit started before the receiver was initialised")
        self._partial = None
        self._digest = xxhash.xxh3_64()
        self._next_bucket = 0
        self._num_tensors = 0

    def update(self, bucket: int) -> None:
        """Load bucket number `bucket`.

        Raises:
            WeightSyncError: another bucket was due.
        """
        if self._plan is None or self._ring is None or bucket != self._next_bucket or bucket >= len(self._plan.buckets):
            raise WeightSyncError(f"update with bucket {bucket}: bucket {self._next_bucket} is due")
        slot = self._ring.slot(bucket)
        complete: list[tuple[str, torch.Tensor]] = []
        for piece in self._plan.buckets[bucket]:
            data = slot[piece.slot_offset : piece.slot_offset + piece.size]
            self._digest.update(data.numpy().data)
            tensor = self._take(piece, data)
            if tensor is not None:
                complete.append(tensor)
        self._next_bucket += 1
        if complete:
            self._load(complete)
            self._num_tensors += len(complete)

    def finish(self) -> Received:
        """Return what was received.

        Raises:
            WeightSyncError: buckets or tensors are missing.
        """
        if self._plan is None or self._info is None:
            raise WeightSyncError("refit finished before the receiver was initialised")
        if self._next_bucket != len(self._plan.buckets) or self._num_tensors != len(self._info.tensors):
            raise WeightSyncError(
                f"refit finished after {self._next_bucket} of {len(self._plan.buckets)} buckets "
                f"and {self._num_tensors} of {len(self._info.tensors)} tensors"
            )
        return Received(self._num_tensors, self._plan.total_bytes, self._digest.hexdigest())

    def close(self) -> None:
        """Detach from the ring. Idempotent."""
        if self._ring is not None:
            self._ring.close()
        self._ring = self._plan = self._info = self._partial = None

    def _take(self, piece: Piece, data: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the tensor that `piece` completes, or None when more of it is to come."""
        assert self._info is not None
        spec = self._info.tensors[piece.tensor]
        size = num_bytes(spec)
        if piece.size == size:
            whole = data.clone() if self._keeps_tensors else data
        else:
            if piece.tensor_offset == 0:
                self._partial = torch.empty(size, dtype=torch.uint8)
            assert self._partial is not None
            self._partial[piece.tensor_offset : piece.tensor_offset + piece.size].copy_(data)
            if piece.tensor_offset + piece.size < size:
                return None
            whole, self._partial = self._partial, None
        return spec.name, whole.view(torch_dtype(spec)).reshape(spec.shape)


def checksum_of(tensors: list[torch.Tensor]) -> str:
    """Return the checksum of tensors in the given order, as a refit of exactly these bytes would have it."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
