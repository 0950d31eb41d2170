"""Both ends of a transfer, as csrc/refit does it: plans, senders, receivers, digests.

Thin: it hands addresses of tensors to the library and turns errors into `TransferError`. It knows neither engines nor
the driver. Calls release the GIL; tensors must be dense and stay alive during a call. One thread per end, but `abort`
and `close`, which may come from any thread and end a call that waits.

    plan = Plan.build(manifest, bucket_bytes=1 << 20)
    sender = NativeSender(plan, 0, channel, LinkOptions("shm", 4, num_readers=1, silence_s=20))
    sender.join(30); sender.begin(start); sender.send(0, tensors_of_all_buckets); digests = sender.finish().digests
"""

import base64
import binascii
import ctypes
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.faults import FIRST_READER, NO_BUCKET, FaultKind
from rl.weights.refit_library import (
    NCCL_DIALECTS,
    TRANSPORTS,
    UNIQUE_ID_BYTES,
    WIRE_NAMES,
    WIRE_NUMBERS,
    ErrorRecord,
    LinkRecord,
    TimesRecord,
    call,
    int32s,
    int64s,
    pointers,
    refit_library,
)
from rl.weights.transport import DIGEST_BYTES, RefitStart, TensorSpec, TransportName

_NUM_COUNTS = 6
_PIECE_FIELDS = 6


class Piece(NamedTuple):
    """Bytes [tensor_offset, tensor_offset + size) of tensor number `tensor`, at `bucket_offset` of its bucket."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    size: int


class Bucket(NamedTuple):
    """What travels at once, from one root."""

    root: int
    pieces: tuple[Piece, ...]


class Finished(NamedTuple):
    """What an end did in one refit.

    Attributes:
        digests: One little-endian uint64 per tensor of the plan; 0 for what this end did not carry.
        seconds: copy, digest, wire and total.
    """

    digests: bytes
    seconds: dict[str, float]


@dataclass(frozen=True)
class LinkOptions:
    """How the ends of a transfer meet; both sides need the same numbers.

    Attributes:
        transport: Backend.
        num_slots: Buckets under way at once, at least 2.
        num_readers: Receivers of every sender.
        silence_s: tcp: a peer that says nothing for so long is lost.
        digests: Off only to measure what they cost.
        host: tcp senders: where to listen and be reached.
        port: tcp senders: 0 takes a free one.
        nccl_library: Path of libnccl.
        device_library: nccl: path of the library with the device's operations.
        unique_ids: nccl: base64, one per root.
        nccl_dialect: nccl: how the group warms up, "broadcast" or "allreduce".
        device: nccl: number of the device.
    """

    transport: TransportName
    num_slots: int
    num_readers: int
    silence_s: float
    digests: bool = True
    host: str = ""
    port: int = 0
    nccl_library: str = ""
    device_library: str = ""
    unique_ids: tuple[str, ...] = ()
    nccl_dialect: Literal["broadcast", "allreduce"] = "broadcast"
    device: int = 0


class Plan:
    """What travels and how it is cut; immutable. Made once by `build`, shipped as `blob`, read by `parse`."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._finalizer = weakref.finalize(self, refit_library()["tandem_plan_free"], handle)
        counts = int64s([0] * _NUM_COUNTS)
        refit_library()["tandem_plan_counts"](handle, counts)
        self._num_tensors, self._num_buckets, self._num_pieces = counts[:3]
        self.bucket_bytes, self.total_bytes, self.num_roots = counts[3:]

    @classmethod
    def build(cls, manifest: Sequence[TensorSpec], bucket_bytes: int, num_roots: int = 1) -> "Plan":
        """Cut a manifest into buckets.

        Raises:
            TransferError: an empty manifest, a repeated name, an impossible size; names the tensor.
        """
        strange = next((spec for spec in manifest if spec.dtype not in WIRE_NAMES), None)
        if strange is not None:
            raise WeightSyncError(
                f"tensor '{strange.name}' has dtype {strange.dtype}; a refit carries {', '.join(WIRE_NAMES)}"
            )
        names = (ctypes.c_char_p * max(1, len(manifest)))(*(spec.name.encode() for spec in manifest))
        types = int32s([WIRE_NAMES.index(spec.dtype) for spec in manifest])
        ranks = int32s([len(spec.shape) for spec in manifest])
        extents = int64s([extent for spec in manifest for extent in spec.shape])
        handle = ctypes.c_void_p()
        sizes = (len(manifest), bucket_bytes, num_roots)
        call("tandem_plan_build", names, types, ranks, extents, *sizes, ctypes.byref(handle))
        assert handle.value is not None
        return cls(handle.value)

    @classmethod
    def parse(cls, blob: bytes, digest: str) -> "Plan":
        """Read a plan that another process built.

        Raises:
            TransferError: not a plan.
            WeightSyncError: not the plan that `digest` is of.
        """
        handle = ctypes.c_void_p()
        call("tandem_plan_parse", blob, len(blob), ctypes.byref(handle))
        assert handle.value is not None
        plan = cls(handle.value)
        if plan.digest != digest:
            raise WeightSyncError(
                f"the plan that arrived has digest {plan.digest}, the sender announced {digest}: {len(blob)} bytes"
            )
        return plan

    @cached_property
    def blob(self) -> bytes:
        """The serialized plan."""
        serialize = refit_library()["tandem_plan_serialize"]
        buffer = ctypes.create_string_buffer(serialize(self.handle, None, 0))
        serialize(self.handle, buffer, len(buffer))
        return buffer.raw

    @cached_property
    def digest(self) -> str:
        """Of the serialized plan, 16 hexadecimal digits."""
        return f"{refit_library()['tandem_plan_digest'](self.handle):016x}"

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The manifest."""
        return tuple(self._tensor(index) for index in range(self._num_tensors))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, in the order in which a receiver takes them."""
        table = int64s([0] * (_PIECE_FIELDS * self._num_pieces))
        refit_library()["tandem_plan_pieces"](self.handle, table)
        pieces: list[list[Piece]] = [[] for _ in range(self._num_buckets)]
        roots = [0] * self._num_buckets
        for start in range(0, _PIECE_FIELDS * self._num_pieces, _PIECE_FIELDS):
            bucket, tensor, tensor_offset, bucket_offset, size, root = table[start : start + _PIECE_FIELDS]
            pieces[bucket].append(Piece(tensor, tensor_offset, bucket_offset, size))
            roots[bucket] = root
        return tuple(Bucket(root, tuple(part)) for root, part in zip(roots, pieces, strict=True))

    def buckets_of(self, root: int) -> tuple[int, ...]:
        """The numbers of the buckets of one root, in order."""
        return tuple(number for number, bucket in enumerate(self.buckets) if bucket.root == root)

    def _tensor(self, index: int) -> TensorSpec:
        number, rank, extents = ctypes.c_int32(), ctypes.c_int32(), ctypes.POINTER(ctypes.c_int64)()
        where = (ctypes.byref(number), ctypes.byref(rank), ctypes.byref(extents))
        name = refit_library()["tandem_plan_tensor"](self.handle, index, *where)
        return TensorSpec(name.decode(), WIRE_NAMES[number.value], tuple(extents[: rank.value]))

    def __reduce__(self) -> tuple[object, tuple[bytes, str]]:
        """Travel as bytes."""
        return Plan.parse, (self.blob, self.digest)


class _End:
    """What both ends share: a native object with calls of one thread, and abort and close from any."""

    def __init__(self, side: str, plan: Plan, rank: int, options: LinkOptions) -> None:
        self._side = side
        self.plan = plan
        self._rank = rank
        self._on_host = options.transport != "nccl"
        self._handle: int | None = None
        self._guard = threading.Lock()  # the handle
        self._calling = threading.Lock()  # a call is under way

    def _open(self, record: LinkRecord) -> None:
        handle = ctypes.c_void_p()
        call(f"tandem_{self._side}_open", self.plan.handle, ctypes.byref(record), ctypes.byref(handle))
        self._handle = handle.value

    def join(self, timeout_s: float) -> None:
        """Wait until all ends are there.

        Raises:
            TransferError: they are not in time, or disagree.
        """
        self._call("join", timeout_s)

    def begin(self, start: RefitStart) -> None:
        """Begin a refit; all later waits of it end at its deadline.

        Raises:
            TransferError: an epoch that is not larger than the last, or a link that has failed.
        """
        self._call("begin", start.epoch, start.version, start.timeout_s)

    def finish(self) -> Finished:
        """End the refit: everything has arrived, on every side.

        Raises:
            TransferError: it has not.
        """
        digests = (ctypes.c_uint64 * max(1, len(self.plan.tensors)))()
        times = TimesRecord()
        self._call("finish", digests, ctypes.byref(times))
        seconds = {"copy": times.copy, "digest": times.digest, "wire": times.wire, "total": times.total}
        return Finished(_little_endian(digests, len(self.plan.tensors)), seconds)

    def abort(self, reason: str, kind: FaultKind = "aborted", bucket: int = NO_BUCKET) -> None:
        """Give up and tell the other ends why; from any thread, idempotent, also after close."""
        record = ErrorRecord.of(reason, kind, self._rank, bucket)
        with self._guard:
            if self._handle is not None:
                refit_library()[f"tandem_{self._side}_abort"](self._handle, ctypes.byref(record))

    def close(self) -> None:
        """Release links and memory; ends a call that is under way. Idempotent."""
        if not self._calling.acquire(blocking=False):
            self.abort("closed while a call was under way")
            self._calling.acquire()
        try:
            with self._guard:
                handle, self._handle = self._handle, None
            if handle is not None:
                refit_library()[f"tandem_{self._side}_free"](handle)
        finally:
            self._calling.release()

    def _transfer(self, verb: str, first: int, tensors: Sequence[Sequence[Tensor]]) -> None:
        root = self._rank if self._side == "sender" else None
        buckets = self.plan.buckets
        # No further than what is given: a call per bucket that looked through the rest of the plan would be quadratic.
        own = (number for number in range(first, len(buckets)) if root in (None, buckets[number].root))
        numbers = list(islice(own, len(tensors)))
        if len(numbers) < len(tensors):
            raise ValueError(f"{len(tensors)} buckets from number {first} on; the plan has {len(numbers)} there")
        pieces: list[Piece] = []
        for number, given in zip(numbers, tensors, strict=True):
            expected = self.plan.buckets[number].pieces
            if len(given) != len(expected):
                raise ValueError(f"{len(given)} tensors for bucket {number}, which has {len(expected)} pieces")
            pieces.extend(expected)
        flat = [tensor for given in tensors for tensor in given]
        addresses, types = self._table(pieces, flat)
        self._call(verb, first, len(tensors), pointers(addresses), int32s(types))

    def _table(self, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        # Ten thousands of tensors take as long here as megabytes on the wire, so one pass, and words only for a fault.
        shapes, on_host = self._shapes, self._on_host
        addresses, types = [], []
        for piece, tensor in zip(pieces, tensors, strict=True):
            number = WIRE_NUMBERS.get(tensor.dtype)
            is_fit = number is not None and tensor.shape == shapes[piece.tensor] and tensor.is_contiguous()
            if number is None or not is_fit or (on_host and not tensor.is_cpu):
                self._check(piece.tensor, tensor)
            else:
                addresses.append(tensor.data_ptr())
                types.append(number)
        return addresses, types

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [spec.shape for spec in self.plan.tensors]

    def _check(self, index: int, tensor: Tensor) -> None:
        spec = self.plan.tensors[index]
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"tensor '{spec.name}' has shape {list(tensor.shape)}, the plan {list(spec.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"tensor '{spec.name}' is not contiguous: strides {tensor.stride()}")
        if tensor.dtype not in WIRE_NUMBERS:
            raise ValueError(f"tensor '{spec.name}' has dtype {tensor.dtype}; a refit carries {', '.join(WIRE_NAMES)}")
        if self._on_host and tensor.device.type != "cpu":
            raise ValueError(f"tensor '{spec.name}' is on {tensor.device}; shm and tcp take tensors in host memory")

    def _call(self, verb: str, *arguments: object) -> None:
        with self._calling:
            if self._handle is None:
                raise WeightSyncError(f"this {self._side} is closed; it cannot {verb}")
            call(f"tandem_{self._side}_{verb}", self._handle, *arguments)


class NativeSender(_End):
    """One root's end.

    `address`: shm: the segment's name; tcp: where to listen, unless `options.host` says it; nccl: the root's unique id
    in base64, unless `options.unique_ids` has it.
    """

    def __init__(self, plan: Plan, root: int, address: str, options: LinkOptions) -> None:
        """Make the link.

        Raises:
            TransferError: the name is taken, no memory, no address, no library.
        """
        super().__init__("sender", plan, root, options)
        ids = options.unique_ids or ((address,) * plan.num_roots if options.transport == "nccl" else ())
        place = options.host or address if options.transport == "tcp" else address
        record = _link(options, [place], _one_per_root(ids, plan))
        record.root = root
        self._open(record)
        if options.transport == "nccl":
            self.address = ids[root]
        else:
            size = refit_library()["tandem_sender_address"](self._handle, None, 0)
            buffer = ctypes.create_string_buffer(size)
            refit_library()["tandem_sender_address"](self._handle, buffer, size)
            self.address = buffer.raw.decode()

    def send(self, first: int, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Send buckets of this root, from number `first` on: for each the tensors of its pieces, whole and dense.

        Raises:
            TransferError: the transfer failed.
            ValueError: a tensor that is not what the plan says; names it.
        """
        self._transfer("send", first, tensors)


class NativeReceiver(_End):
    """One reader's end, over the links of all roots."""

    def __init__(self, plan: Plan, reader: int, addresses: Sequence[str], options: LinkOptions) -> None:
        """Attach to the links.

        Raises:
            TransferError: they cannot be reached.
        """
        super().__init__("receiver", plan, FIRST_READER + reader, options)
        if len(addresses) != plan.num_roots:
            raise WeightSyncError(f"{len(addresses)} addresses for {plan.num_roots} roots")
        ids = options.unique_ids or (tuple(addresses) if options.transport == "nccl" else ())
        record = _link(options, addresses, _one_per_root(ids, plan))
        record.reader = reader
        self._open(record)

    def receive(self, first: int, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Receive buckets from number `first` on: for each the whole tensors that its pieces go into.

        Raises:
            TransferError: the transfer failed.
            ValueError: a tensor that is not what the plan says; names it.
        """
        self._transfer("receive", first, tensors)


def digests_of(tensors: Sequence[Tensor]) -> bytes:
    """Return the digest of each tensor's bytes, a little-endian uint64 each.

    Raises:
        ValueError: a tensor that is not dense or not in host memory.
    """
    for position, tensor in enumerate(tensors):
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"tensor {position} is not contiguous or on {tensor.device}; digests need host memory")
    digests = (ctypes.c_uint64 * max(1, len(tensors)))()
    sizes = int64s([tensor.nbytes for tensor in tensors])
    addresses = pointers([tensor.data_ptr() for tensor in tensors])
    refit_library()["tandem_digest"](addresses, sizes, len(tensors), digests)
    return _little_endian(digests, len(tensors))


def nccl_unique_id(library: str) -> str:
    """Make the id of a new NCCL group, base64; `library` is the path of libnccl.

    Raises:
        TransferError: the library is missing or refuses.
    """
    buffer = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
    call("tandem_nccl_unique_id", library.encode(), buffer)
    return base64.b64encode(buffer.raw).decode()


def _link(options: LinkOptions, addresses: Sequence[str], unique_ids: Sequence[str]) -> LinkRecord:
    ids = b"".join(map(_id_bytes, unique_ids))
    return LinkRecord(
        transport=TRANSPORTS[options.transport],
        num_slots=options.num_slots,
        num_readers=options.num_readers,
        has_digests=int(options.digests),
        addresses=(ctypes.c_char_p * len(addresses))(*(address.encode() for address in addresses)),
        port=options.port,
        silence_s=options.silence_s,
        nccl_library=options.nccl_library.encode(),
        device_library=options.device_library.encode(),
        unique_ids=ids if ids else None,
        nccl_dialect=NCCL_DIALECTS[options.nccl_dialect],
        device=options.device,
    )


def _little_endian(digests: "ctypes.Array[ctypes.c_uint64]", count: int) -> bytes:
    if sys.byteorder == "little":
        return bytes(memoryview(digests).cast("B")[: DIGEST_BYTES * count])
    return b"".join(value.to_bytes(DIGEST_BYTES, "little") for value in digests[:count])


def _one_per_root(ids: Sequence[str], plan: Plan) -> Sequence[str]:
    """The library looks up each root's; fewer would have it read beyond."""
    if ids and len(ids) != plan.num_roots:
        raise WeightSyncError(f"{len(ids)} NCCL ids for {plan.num_roots} roots")
    return ids


def _id_bytes(text: str) -> bytes:
    """The library reads so many bytes of each; shorter ones would have it read beyond."""
    try:
        found = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise WeightSyncError(f"'{text}' is no NCCL id: {error}") from error
    if len(found) != UNIQUE_ID_BYTES:
        raise WeightSyncError(f"an NCCL id has {UNIQUE_ID_BYTES} bytes, '{text}' has {len(found)}")
    return found
