"""The trainer's end of a refit: packs buckets into the ring. Lives in the trainer's worker.

Plain synchronous methods, called in this order: manifest, open, then per refit start, pack(0..n-1), finish; close at
the end. A refit that was given up needs no call: the next start begins anew.
"""

from collections.abc import Callable, Mapping

import torch
import xxhash

from rl.core.errors import WeightSyncError
from rl.core.types import PolicyVersion
from rl.weights.host import SharedRing
from rl.weights.manifest import first_difference, manifest_of, wire_dtype
from rl.weights.plan import BucketPlan, check_plan
from rl.weights.transport import TensorSpec, TransferInfo


class WeightSender:
    """Sends the tensors that `named_tensors` returns, in its order.

    Args:
        named_tensors: Called at every start; tied weights once, under the name of the checkpoint. The tensors must
            not change until finish.
        dtype: Of floating-point tensors on the wire, cast one at a time while packing; None = each its own.
    """

    def __init__(
        self, named_tensors: Callable[[], Mapping[str, torch.Tensor]], dtype: torch.dtype | None = None
    ) -> None:
        self._named_tensors = named_tensors
        self._dtype = dtype
        self._info: TransferInfo | None = None
        self._plan: BucketPlan | None = None
        self._ring: SharedRing | None = None
        self._tensors: list[torch.Tensor] = []
        self._flat: tuple[int, torch.Tensor] | None = None
        self._digest = xxhash.xxh3_64()
        self._next_bucket = 0

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order."""
        return manifest_of(self._named_tensors(), self._dtype)

    def open(self, info: TransferInfo) -> None:
        """Create the ring.

        Raises:
            WeightSyncError: the plan or the manifest differs from the driver's; names the first differing tensor.
        """
        self._check_manifest(info, self.manifest())
        plan = check_plan(info)
        self.close()
        self._ring = SharedRing.create(info.channel, info.bucket_bytes, info.num_slots)
        self._info, self._plan = info, plan

    def start(self, version: PolicyVersion) -> None:
        """Begin a refit; whatever was left of an earlier one is forgotten."""
        if self._info is None:
            raise WeightSyncError(f"refit of version {version}: the sender is not open")
        tensors = self._named_tensors()
        self._check_manifest(self._info, manifest_of(tensors, self._dtype))
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        self._flat = None
        self._digest = xxhash.xxh3_64()
        self._next_bucket = 0

    def pack(self, bucket: int) -> None:
        """Copy bucket number `bucket` into its slot. Buckets come in order.

        Raises:
            WeightSyncError: another bucket was due.
        """
        if self._plan is None or self._ring is None or bucket != self._next_bucket or bucket >= len(self._plan.buckets):
            raise WeightSyncError(f"pack of bucket {bucket}: bucket {self._next_bucket} is due")
        slot = self._ring.slot(bucket)
        for piece in self._plan.buckets[bucket]:
            target = slot[piece.slot_offset : piece.slot_offset + piece.size]
            target.copy_(self._bytes_of(piece.tensor)[piece.tensor_offset : piece.tensor_offset + piece.size])
            self._digest.update(target.numpy().data)
        self._next_bucket += 1

    def finish(self) -> str:
        """Return the checksum over all bytes packed, in wire order.

        Raises:
            WeightSyncError: not every bucket was packed.
        """
        total = 0 if self._plan is None else len(self._plan.buckets)
        if self._plan is None or self._next_bucket != total:
            raise WeightSyncError(f"finish after {self._next_bucket} of {total} buckets were packed")
        self._tensors = []
        self._flat = None
        return self._digest.hexdigest()

    def close(self) -> None:
        """Remove the ring. Idempotent."""
        if self._ring is not None:
            self._ring.close()
        self._ring = self._plan = self._info = None
        self._tensors = []
        self._flat = None

    def _bytes_of(self, index: int) -> torch.Tensor:
        """Tensor number `index` as contiguous bytes on the CPU; kept, because a large one spans buckets."""
        if self._flat is None or self._flat[0] != index:
            source = self._tensors[index]
            tensor = source.to(wire_dtype(source, self._dtype)).to("cpu").contiguous().reshape(-1)
            self._flat = (index, tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8))
        return self._flat[1]

    @staticmethod
    def _check_manifest(info: TransferInfo, actual: tuple[TensorSpec, ...]) -> None:
        difference = first_difference(info.tensors, actual)
        if difference is not None:
            raise WeightSyncError(f"the trainer's tensors are not those that were agreed: {difference}")
