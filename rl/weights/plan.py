"""The bucket plan: which bytes of which tensor go where in which bucket.

Pure: a function of the manifest and the bucket size alone, so both ends compute it and compare digests. Buckets are
filled greedily in manifest order. A tensor that does not fit the rest of a bucket starts the next one; only a tensor
larger than a whole bucket is split. Every piece starts at a multiple of `ALIGNMENT`, so a whole tensor can be viewed
in place whatever its dtype.

    plan = plan_buckets(manifest, bucket_bytes=64 << 20)
    for piece in plan.buckets[0]: ...
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rl.core.errors import WeightSyncError
from rl.weights.manifest import fingerprint, num_bytes
from rl.weights.transport import TensorSpec, TransferInfo

ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """Bytes [tensor_offset, tensor_offset + size) of tensor number `tensor`, at `slot_offset` of its bucket."""

    tensor: int
    tensor_offset: int
    slot_offset: int
    size: int


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a refit, in the order in which they are sent."""

    buckets: tuple[tuple[Piece, ...], ...]
    bucket_bytes: int
    total_bytes: int
    digest: str


def align(offset: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def plan_buckets(manifest: Sequence[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """Return the plan for a manifest.

    Args:
        manifest: The tensors in wire order.
        bucket_bytes: Capacity of one bucket; a positive multiple of ALIGNMENT.

    Raises:
        WeightSyncError: an empty manifest, a duplicate name, or an impossible bucket size.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise WeightSyncError(f"bucket of {bucket_bytes} bytes: it must be a positive multiple of {ALIGNMENT}")
    if not manifest:
        raise WeightSyncError("the trainer offers no tensor to send; nothing would be updated")
    names = [spec.name for spec in manifest]
    if len(set(names)) != len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise WeightSyncError(f"tensor '{twice}' stands twice in the manifest")
    buckets: list[list[Piece]] = [[]]
    used = 0
    for index, spec in enumerate(manifest):
        size = num_bytes(spec)
        offset = 0
        if buckets[-1] and used + size > bucket_bytes:
            buckets.append([])
            used = 0
        while True:
            part = min(size - offset, bucket_bytes - used)
            buckets[-1].append(Piece(index, offset, used, part))
            offset, used = offset + part, align(used + part)
            if offset == size:
                break
            buckets.append([])
            used = 0
    return _sealed(manifest, tuple(tuple(bucket) for bucket in buckets), bucket_bytes)


def check_plan(info: TransferInfo) -> BucketPlan:
    """Compute the plan of a transfer and compare it with the digest that the driver shipped.

    Raises:
        WeightSyncError: the digests differ: the two ends would cut the stream differently.
    """
    plan = plan_buckets(info.tensors, info.bucket_bytes)
    if plan.digest != info.plan_digest:
        raise WeightSyncError(
            f"bucket plan {plan.digest[:12]} of this process differs from {info.plan_digest[:12]} of the driver "
            f"({len(info.tensors)} tensors, buckets of {info.bucket_bytes} bytes): run the same release on both ends"
        )
    return plan


def _sealed(manifest: Sequence[TensorSpec], buckets: tuple[tuple[Piece, ...], ...], bucket_bytes: int) -> BucketPlan:
    layout = [[[p.tensor, p.tensor_offset, p.slot_offset, p.size] for p in bucket] for bucket in buckets]
    text = json.dumps([fingerprint(manifest), bucket_bytes, layout], separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return BucketPlan(buckets, bucket_bytes, sum(num_bytes(spec) for spec in manifest), digest)
