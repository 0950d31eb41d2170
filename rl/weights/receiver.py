"""An engine rank's end of a refit: takes buckets off the wire and puts whole tensors where the engine wants them.

Engine-neutral and synchronous; an engine's own adapter calls it. Order: init, then per refit start, update, finish;
close at the end. One thread, but `abort` and `close`, which may come from any and end a call that waits. A refit that
failed needs a new `init`: its links are of no more use. It sets no version and knows no layers.

    receiver = WeightReceiver(InPlace(dict(model.named_parameters(remove_duplicate=False))), "generation[0]")
    receiver.init(info, reader=0)
    receiver.start(start); receiver.update(); received = receiver.finish()
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.core.types import NO_VERSION
from rl.weights.links import link_options, memory_of, on_default_stream
from rl.weights.manifest import is_castable, num_bytes, torch_dtype
from rl.weights.native import Bucket, Finished, NativeReceiver, Piece, Plan
from rl.weights.transport import RefitStart, TensorSpec, TransferInfo

# A reader waits a little longer than asked: at a deadline the senders know which reader is missing, so their word comes
# first.
_LATER_S = 1.0
LoadTensors = Callable[[list[tuple[str, Tensor]]], None]


@dataclass(frozen=True)
class Received:
    """What one refit delivered.

    Attributes:
        num_tensors: Whole tensors handed to the engine.
        digests: One little-endian uint64 per tensor of the manifest, of the bytes that arrived.
        seconds: copy, digest, wire, total, and load: what the engine itself took.
    """

    num_tensors: int
    digests: bytes
    seconds: dict[str, float]


class Sink(Protocol):
    """Where tensors of a refit go."""

    def prepare(self, manifest: Sequence[TensorSpec], memory: torch.device) -> bool:
        """Accept a manifest; return whether all of it goes straight into the engine's own memory.

        Args:
            manifest: What will arrive.
            memory: Where a destination must lie.

        Raises:
            WeightSyncError: a tensor that the engine cannot take, or lacks; names it.
        """
        ...

    def destination(self, spec: TensorSpec, slot: Tensor | None) -> Tensor:
        """Return the memory for a whole tensor, contiguous; `slot` is memory that is free until `deliver` is over."""
        ...

    def deliver(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Take tensors that are complete, in wire order."""
        ...


class InPlace:
    """Tensors of the engine, overwritten as the bytes arrive; casts among float32, bfloat16 and float16.

    Args:
        targets: By manifest name; several names of one tied tensor lead to the same memory.
        is_partial: Whether some targets may stay as they are: only adapters are sent, for example.
    """

    def __init__(self, targets: Mapping[str, Tensor], *, is_partial: bool = False) -> None:
        self._targets = {name: tensor.detach() for name, tensor in targets.items()}
        self._is_partial = is_partial
        self._memory = torch.device("cpu")

    def prepare(self, manifest: Sequence[TensorSpec], memory: torch.device) -> bool:
        """See `Sink.prepare`."""
        self._memory = memory
        for spec in manifest:
            self._check(spec)
        sent = {_identity(spec.name, self._targets[spec.name]) for spec in manifest}
        missing = [name for name, tensor in self._targets.items() if _identity(name, tensor) not in sent]
        if missing and not self._is_partial:
            raise WeightSyncError(f"the trainer does not send '{missing[0]}' ({len(missing)} tensors in all)")
        return all(self._is_direct(self._targets[spec.name]) for spec in manifest)

    def destination(self, spec: TensorSpec, slot: Tensor | None) -> Tensor:
        """Return the engine's own memory where it is dense and reachable."""
        target = self._targets[spec.name]
        return target if self._is_direct(target) else _whole(spec, slot, self._memory)

    def deliver(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Copy what could not be written in place."""
        for name, tensor in tensors:
            if tensor is not self._targets[name]:
                self._targets[name].copy_(tensor)

    def _is_direct(self, target: Tensor) -> bool:
        return target.is_contiguous() and target.device == self._memory

    def _check(self, spec: TensorSpec) -> None:
        target = self._targets.get(spec.name)
        if target is None or tuple(target.shape) != spec.shape:
            own = "no such tensor" if target is None else f"shape {list(target.shape)}"
            raise WeightSyncError(
                f"cannot take '{spec.name}' of shape {list(spec.shape)}: the generator's model has {own}"
            )
        if target.is_meta:
            raise WeightSyncError(f"cannot take '{spec.name}': the generator's is on the device meta and holds nothing")
        if not is_castable(torch_dtype(spec), target.dtype):
            raise WeightSyncError(f"cannot take '{spec.name}' as {spec.dtype}: the generator's is {target.dtype}")


class Staged:
    """Tensors handed to the engine's own loader, those of one bucket at a time.

    Args:
        load: Called once per bucket that completes tensors, in wire order.
        keeps_tensors: Whether `load` may keep its tensors beyond the call; each has memory of its own then.
        check: Called with the manifest at `init`; raises WeightSyncError when the engine cannot take it.
    """

    def __init__(
        self,
        load: LoadTensors,
        *,
        keeps_tensors: bool,
        check: Callable[[Sequence[TensorSpec]], None] | None = None,
    ) -> None:
        self._load = load
        self._keeps_tensors = keeps_tensors
        self._check = check
        self._memory = torch.device("cpu")

    def prepare(self, manifest: Sequence[TensorSpec], memory: torch.device) -> bool:
        """See `Sink.prepare`."""
        self._memory = memory
        if self._check is not None:
            self._check(manifest)
        return False

    def destination(self, spec: TensorSpec, slot: Tensor | None) -> Tensor:
        """Return memory that outlives the bucket where the loader may keep it."""
        return _whole(spec, None if self._keeps_tensors else slot, self._memory)

    def deliver(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Load."""
        self._load(tensors)


class WeightReceiver:
    """Receives into `sink`.

    Args:
        sink: Where tensors go.
        name: Of this engine rank, for messages: "generation[1].0".
        device: Where the engine's weights lie.
    """

    def __init__(self, sink: Sink, name: str, device: torch.device | None = None) -> None:
        self._sink = sink
        self._name = name
        self._device = torch.device("cpu") if device is None else device
        self._memory = self._device
        self._guard = threading.Lock()  # the native end, which abort and close reach from other threads
        self._native: NativeReceiver | None = None
        self._phase = "closed"
        self._last_epoch = -1
        self._start = RefitStart(-1, NO_VERSION, 0.0)
        self._deadline = 0.0
        self._all_direct = False
        self._slot: Tensor | None = None
        self._open: dict[int, Tensor] = {}
        self._num_tensors = 0
        self._load_s = 0.0
        self._finished: Finished | None = None

    @property
    def manifest(self) -> tuple[TensorSpec, ...]:
        """The tensors that were agreed at `init`."""
        return self._end("manifest").plan.tensors

    def init(self, info: TransferInfo, reader: int) -> None:
        """Check plan and tensors, and join the links as reader number `reader`.

        Raises:
            WeightSyncError: the plan is damaged, or a tensor is not the engine's; names it.
            TransferError: the senders cannot be reached, or not all readers show up in time.
        """
        self.close()
        plan = Plan.parse(info.plan, info.plan_digest)
        self._memory = memory_of(info.transport, self._device)
        try:
            self._all_direct = self._sink.prepare(plan.tensors, self._memory)
        except WeightSyncError as error:
            raise WeightSyncError(f"{self._name}: {error}") from error
        options = link_options(info.transport, info.num_slots, len(info.readers), self._device, info.link)
        native = NativeReceiver(plan, reader, info.addresses, options)
        with self._guard:
            self._native = native
        native.join(info.timeout_s + _LATER_S)
        self._phase = "joined"

    def start(self, start: RefitStart) -> None:
        """Begin a refit; waits for nobody, as the senders may begin later.

        Raises:
            WeightSyncError: no links, or an epoch that is not new.
        """
        self._end("start")
        if self._phase not in ("joined", "finished"):
            raise WeightSyncError(f"{self._name}: start of version {start.version} while the refit is {self._phase}")
        if start.epoch <= self._last_epoch:
            raise WeightSyncError(
                f"{self._name}: epoch {start.epoch} of version {start.version} is old; {self._last_epoch} was the last"
            )
        self._last_epoch = start.epoch
        self._start = start
        self._deadline = time.monotonic() + start.timeout_s
        self._open = {}
        self._num_tensors = 0
        self._load_s = 0.0
        self._phase = "started"

    @torch.no_grad()
    def update(self) -> None:
        """Receive all buckets and hand their tensors to the sink.

        Raises:
            WeightSyncError: no refit was started.
            TransferError: the transfer failed; the other ends learn why.
        """
        native = self._end("update")
        if self._phase != "started":
            raise WeightSyncError(f"{self._name}: update while the refit is {self._phase}")
        self._phase = "broken"  # until all of it has arrived
        buckets = native.plan.buckets
        step = len(buckets) if self._all_direct else 1
        left_s = max(0.0, self._deadline - time.monotonic()) + _LATER_S
        try:
            with on_default_stream(self._memory):
                native.begin(replace(self._start, timeout_s=left_s))
                for first in range(0, len(buckets), step):
                    self._take(native, first, buckets[first : first + step])
                # Already here, as over NCCL all ends come to the end of a refit together: `send` waits for it.
                self._finished = native.finish()
        except BaseException as error:  # an interrupt of this process, too, must not leave the others waiting
            native.abort(f"{self._name}: {str(error) or type(error).__name__}")
            raise
        self._phase = "received"

    def finish(self) -> Received:
        """Return what arrived in the refit. A second call for one refit is an error.

        Raises:
            WeightSyncError: buckets or tensors are missing, or the refit is finished already.
        """
        native = self._end("finish")
        if self._phase != "received":
            raise WeightSyncError(f"{self._name}: finish while the refit is {self._phase}")
        total = len(native.plan.tensors)
        if self._num_tensors != total:
            raise WeightSyncError(f"{self._name}: {self._num_tensors} of {total} tensors arrived")
        assert self._finished is not None
        finished, self._finished = self._finished, None
        self._phase = "finished"
        return Received(total, finished.digests, finished.seconds | {"load": self._load_s})

    def abort(self, reason: str) -> None:
        """Give up what is under way and tell the other ends; from any thread, idempotent."""
        with self._guard:
            native = self._native
        if native is not None:
            native.abort(reason)

    def close(self) -> None:
        """Leave the links; idempotent."""
        with self._guard:
            native, self._native = self._native, None
        if native is not None:
            native.close()
        self._phase = "closed"
        self._slot = None
        self._open = {}

    def _end(self, phase: str) -> NativeReceiver:
        native = self._native
        if native is None:
            raise WeightSyncError(f"{self._name}: {phase} before the receiver was initialised")
        return native

    def _take(self, native: NativeReceiver, first: int, buckets: Sequence[Bucket]) -> None:
        """Receive some buckets, then deliver the tensors that they complete."""
        specs = native.plan.tensors
        memory = [[self._memory_of(native.plan, piece) for piece in bucket.pieces] for bucket in buckets]
        native.receive(first, memory)
        complete: list[tuple[str, Tensor]] = []
        for piece in (piece for bucket in buckets for piece in bucket.pieces):
            if piece.tensor_offset + piece.size == num_bytes(specs[piece.tensor]):
                complete.append((specs[piece.tensor].name, self._open.pop(piece.tensor)))
        if complete:
            begin = time.perf_counter()
            self._sink.deliver(complete)
            self._load_s += time.perf_counter() - begin
            self._num_tensors += len(complete)

    def _memory_of(self, plan: Plan, piece: Piece) -> Tensor:
        """The whole tensor that a piece is of; one that came in part already stays the same."""
        tensor = self._open.get(piece.tensor)
        if tensor is None:
            spec = plan.tensors[piece.tensor]
            is_whole = piece.size == num_bytes(spec)
            tensor = self._sink.destination(spec, self._slot_of(plan, piece) if is_whole else None)
            self._open[piece.tensor] = tensor
        return tensor

    def _slot_of(self, plan: Plan, piece: Piece) -> Tensor | None:
        if self._all_direct:
            return None
        if self._slot is None:
            self._slot = torch.empty(plan.bucket_bytes, dtype=torch.uint8, device=self._memory)
        return self._slot[piece.bucket_offset : piece.bucket_offset + piece.size]


def _whole(spec: TensorSpec, slot: Tensor | None, memory: torch.device) -> Tensor:
    dtype = torch_dtype(spec)
    if slot is None or slot.numel() == 0:
        return torch.empty(spec.shape, dtype=dtype, device=memory)
    return slot.view(dtype).view(spec.shape)


def _identity(name: str, tensor: Tensor) -> object:
    """Equal for the names of one tied tensor."""
    return (tensor.data_ptr(), tensor.nbytes) if tensor.numel() else name
