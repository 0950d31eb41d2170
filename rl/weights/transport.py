"""The contract between the two ends of a refit and the driver; vLLM's own four phases: init, start, update, finish.

The driver-side transaction (`rl.weights.sync.WeightSync`) speaks to one sender (all trainer ranks behind one handle)
and to many receivers (one per engine, all ranks behind it) through these protocols and never sees a tensor or a bucket.
A reader is one process that receives: engines of several ranks have several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from rl.core.types import PolicyVersion

TransportName = Literal["shm", "tcp", "nccl"]
# Requests in flight: finish them, freeze them and go on after, or end them.
PauseMode = Literal["drain", "keep", "abort"]
# Of one tensor's digest: a little-endian uint64.
DIGEST_BYTES: Final = 8


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the manifest: Hugging Face name, wire dtype (torch name, e.g. "float32") and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """What a receiver stores of a tensor: the box that begins at `start` and has `shape`, both by axis."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LinkSettings:
    """What both ends of a link must know beside the plan; a transport ignores what is not its own.

    Attributes:
        silence_s: tcp: a peer that says nothing for so long is lost.
        digests: Off only to measure what they cost.
        host: tcp: the address at which roots listen and are reached; empty = each root's own on the default network.
        nccl_library: nccl: path of libnccl; empty = where it is found.
        device_library: nccl: path of the library with the device's operations; empty = where it is found.
        nccl_dialect: nccl: how the group warms up.
    """

    silence_s: float
    digests: bool = True
    host: str = ""
    nccl_library: str = ""
    device_library: str = ""
    nccl_dialect: Literal["broadcast", "allreduce"] = "broadcast"


@dataclass(frozen=True)
class OpenRequest:
    """What the driver wants of a sender.

    Attributes:
        transport: Backend.
        channel: Unique name of this set of links; begins with the run's tag.
        bucket_bytes: Capacity of a bucket.
        num_slots: Buckets under way at once, at least 2.
        readers: Names of all readers in rank order, for messages ("generation[1].0" = rank 0 of replica 1).
        timeout_s: Deadline of `join`.
        link: What the transport needs beside.
        num_roots: Trainer ranks that send; 0 = all where the weights are sharded over them, else one.
        layout: What all readers of these links store; empty = whole tensors. Readers that store other parts have links
            of their own.
    """

    transport: TransportName
    channel: str
    bucket_bytes: int
    num_slots: int
    readers: tuple[str, ...]
    timeout_s: float
    link: LinkSettings
    num_roots: int = 0
    layout: tuple[StoredTensor, ...] = ()


@dataclass(frozen=True)
class TransferInfo:
    """All that a reader needs to join: made by the sender, shipped to every reader.

    Attributes:
        transport: Backend.
        addresses: One per root: segment name, "host:port", or the base64 NCCL id.
        plan: The serialized plan; manifest and buckets.
        plan_digest: Of these bytes, 16 hexadecimal digits.
        num_slots: Slots of each link.
        readers: Names of all readers in rank order.
        timeout_s: Deadline of joining.
        link: What the transport needs beside.
    """

    transport: TransportName
    addresses: tuple[str, ...]
    plan: bytes
    plan_digest: str
    num_slots: int
    readers: tuple[str, ...]
    timeout_s: float
    link: LinkSettings


@dataclass(frozen=True)
class RefitStart:
    """One attempt: epochs grow with every attempt, also of the same version; timeout_s is what is left of the refit."""

    epoch: int
    version: PolicyVersion
    timeout_s: float


@dataclass(frozen=True)
class SendReport:
    """What the roots sent.

    Attributes:
        digests: One little-endian uint64 per tensor of the manifest.
        num_bytes: Bytes of one copy.
        seconds: By part: copy, digest, wire, gather; the slowest root.
    """

    digests: bytes
    num_bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Ack:
    """One replica's confirmation of a refit.

    Attributes:
        replica: Who confirms.
        version: The version that the engine itself reports after the update.
        num_tensors: Whole tensors loaded, by every rank.
        digests: One table per reader of the replica: a little-endian uint64 per tensor of the manifest.
        seconds: By part: copy, digest, wire, load; the slowest reader.
    """

    replica: str
    version: PolicyVersion
    num_tensors: int
    digests: tuple[bytes, ...]
    seconds: Mapping[str, float]


class SenderHandle(Protocol):
    """The trainer's end, as the driver sees it; all roots behind one handle."""

    async def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order; tied weights once."""
        ...

    async def open(self, request: OpenRequest) -> TransferInfo:
        """Make plan and links; earlier ones are closed. Raises WeightSyncError."""
        ...

    async def join(self) -> None:
        """Wait until every reader is there; runs beside the receivers' `init`."""
        ...

    async def send(self, start: RefitStart) -> SendReport:
        """Send all buckets of one refit and wait until every reader has taken them."""
        ...

    async def abort(self, reason: str) -> None:
        """Give up what is under way, and tell the readers why; idempotent, returns soon."""
        ...

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        """Return `rl.weights.signature` of every tensor as the trainer computes with it; for a diagnosis."""
        ...

    async def close(self) -> None:
        """Release links and memory; idempotent."""
        ...


class ReceiverHandle(Protocol):
    """One generator replica's end, as the driver sees it."""

    @property
    def replica(self) -> str:
        """A name for messages: "generation[0]"."""
        ...

    @property
    def num_readers(self) -> int:
        """Processes that receive: the ranks of the engine."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, with requests in flight as `mode` says; to pause what is paused is no error."""
        ...

    async def init(self, info: TransferInfo, first_reader: int) -> None:
        """Join the links, as readers `first_reader`, ... Raises WeightSyncError when plan or tensors differ."""
        ...

    async def start(self, start: RefitStart) -> None:
        """Begin a refit; the engine must be paused."""
        ...

    async def update(self) -> None:
        """Receive and load all buckets; runs beside the sender's `send`."""
        ...

    async def finish(self, version: PolicyVersion) -> Ack:
        """Commit: finalise layers, read back, set the engine's version; return what was loaded."""
        ...

    async def abort(self, reason: str) -> None:
        """Give up what is under way; idempotent, returns soon, and never raises for a replica that is gone."""
        ...

    async def resume(self) -> None:
        """Generate again; whatever sleeps must be woken before."""
        ...

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        """Return `rl.weights.signature` of the tensors as the engine computes with them; for a diagnosis."""
        ...
