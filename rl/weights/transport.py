"""The contract between the two ends of a refit, in vLLM's own four phases: init, start, update*, finish.

The driver-side transaction (`rl.weights.sync.WeightSync`) speaks to one sender and to many receivers through these
protocols and never sees a tensor. A bucket is packed into a slot of the transport by the sender, then loaded from it
by every receiver.
"""

from dataclasses import dataclass
from typing import Protocol

from rl.core.types import PolicyVersion


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the manifest: Hugging Face name, wire dtype (torch name, e.g. "float32") and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TransferInfo:
    """All that a peer needs to join: made once by the driver, shipped to both ends.

    Attributes:
        channel: Transport address; for shared memory the segment's name (it carries the run tag).
        tensors: The manifest, in wire order.
        bucket_bytes: Capacity of one slot.
        num_slots: Slots in the ring.
        plan_digest: Digest of the bucket plan; both ends compute their own and must agree.
    """

    channel: str
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    num_slots: int
    plan_digest: str


@dataclass(frozen=True)
class Ack:
    """One replica's confirmation of a refit.

    Attributes:
        replica: Who confirms.
        version: The version that the engine itself reports after the update.
        num_tensors: Whole tensors loaded.
        checksum: Digest over all bytes received, in wire order.
    """

    replica: str
    version: PolicyVersion
    num_tensors: int
    checksum: str


class SenderHandle(Protocol):
    """The trainer's end, as the driver sees it."""

    async def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order; tied weights once."""
        ...

    async def open(self, info: TransferInfo) -> None:
        """Create the transport's buffers. Raises WeightSyncError when the plan digests differ."""
        ...

    async def start(self, version: PolicyVersion) -> None:
        """Begin a refit."""
        ...

    async def pack(self, bucket: int) -> None:
        """Pack bucket number `bucket` into its slot (`bucket % num_slots`)."""
        ...

    async def finish(self) -> str:
        """End the refit and return the checksum over all bytes packed, in wire order."""
        ...

    async def close(self) -> None:
        """Release the transport's buffers."""
        ...


class ReceiverHandle(Protocol):
    """One generator replica's end, as the driver sees it."""

    @property
    def replica(self) -> str:
        """A name for messages."""
        ...

    async def init(self, info: TransferInfo) -> None:
        """Open the transport. Raises WeightSyncError when the plan digests differ."""
        ...

    async def start(self, version: PolicyVersion) -> None:
        """Begin a refit; the engine must be paused."""
        ...

    async def update(self, bucket: int) -> None:
        """Load bucket number `bucket` from its slot."""
        ...

    async def finish(self, version: PolicyVersion) -> Ack:
        """Commit: finalise layers, set the engine's version, drop caches; return what was loaded."""
        ...
