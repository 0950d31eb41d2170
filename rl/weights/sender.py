"""A trainer rank's end of a refit: takes tensors from its source, bucket by bucket, and puts them on the wire.

Plain and synchronous; it lives in the trainer's worker. Order: manifest, plan (one rank), open, join, then send per
refit, close. All ranks of a sharded source take part in every send, also those that are no root. `abort` and `close`
may come from another thread and end a call that waits. A refit that failed needs a new `open`.

    sender = WeightSender(LocalSource(named_tensors))
    blob, digest = sender.plan(request)
    address = sender.open(blob, digest, request); sender.join(); report = sender.send(start)
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import NoReturn

import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.addresses import own_address
from rl.weights.faults import TransferError
from rl.weights.layout import SlicedSource
from rl.weights.links import link_options, memory_of, on_default_stream
from rl.weights.manifest import is_castable, num_bytes, torch_dtype
from rl.weights.native import LinkOptions, NativeSender, Plan, nccl_unique_id
from rl.weights.signature import signature_of
from rl.weights.source import WeightSource, check_agreed
from rl.weights.transport import DIGEST_BYTES, OpenRequest, RefitStart, SendReport, TensorSpec


@dataclass(frozen=True)
class TrainerRank:
    """Which part of the trainer sends.

    Attributes:
        rank: Of this process; rank i is root i where there are several.
        world_size: Trainer ranks.
        device: Where the weights lie.
        name: For messages.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    name: str = "policy[0]"


@dataclass(frozen=True)
class _Link:
    """What `open` made: what travels, the plan, and a native end where this rank is a root."""

    source: WeightSource
    plan: Plan
    request: OpenRequest
    native: NativeSender | None


class WeightSender:
    """Sends what `source` yields.

    Args:
        source: The weights; a sharded one moves in lockstep over the ranks.
        place: Who this rank is.
    """

    def __init__(self, source: WeightSource, place: TrainerRank = TrainerRank()) -> None:
        self._source = source
        self._place = place
        self._guard = threading.Lock()  # what abort and close reach from other threads
        self._calling = threading.Lock()  # one call uses the source
        self._link: _Link | None = None
        self._given_up = ""
        self._last_epoch = -1

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order."""
        return self._source.manifest()

    def plan(self, request: OpenRequest) -> tuple[bytes, str]:
        """Cut the manifest into buckets; return the plan and its digest, for all ranks and readers.

        Raises:
            WeightSyncError: nothing to send, a dtype that no wire carries, or an impossible number of roots or bytes.
        """
        world_size = self._place.world_size
        num_roots = request.num_roots or (world_size if self._source.is_sharded else 1)
        if num_roots > world_size:
            raise WeightSyncError(f"{num_roots} trainer ranks shall send, there are {world_size}")
        plan = Plan.build(self._source_of(request).manifest(), request.bucket_bytes, num_roots)
        return plan.blob, plan.digest

    def open(self, blob: bytes, digest: str, request: OpenRequest) -> str:
        """Make this rank's link; return its address, or the empty string when this rank is no root.

        Raises:
            WeightSyncError: the plan is not of this rank's tensors, naming the first that differs; an earlier send
                does not end; or the ranks of a sharded source do not meet.
            TransferError: the link cannot be made.
        """
        deadline = time.monotonic() + request.timeout_s
        self.abort("the links are opened anew")
        self.close()
        with self._alone("open", request.timeout_s):
            source = self._source_of(request)
            # Before anything that may fail on one rank alone: the others would wait for it here.
            source.connect(request.channel, max(0.0, deadline - time.monotonic()))
            plan = Plan.parse(blob, digest)
            check_agreed(plan.tensors, source.manifest())
            native = self._native(plan, request) if self._place.rank < plan.num_roots else None
            with self._guard:
                self._link, self._given_up = _Link(source, plan, request, native), ""
        return "" if native is None else native.address

    def join(self) -> None:
        """Wait until every reader has joined this rank's link.

        Raises:
            WeightSyncError: not open.
            TransferError: a reader did not show up in time; names it.
        """
        link = self._opened("join")
        if link.native is not None:
            link.native.join(link.request.timeout_s)

    def send(self, start: RefitStart) -> SendReport:
        """Send this rank's buckets, taking part in the gathering of all, and wait until every reader has taken them.

        Raises:
            WeightSyncError: not open, an epoch that is not new, or tensors that changed.
            TransferError: the transfer failed, and the readers learn why; "aborted" when another rank failed.
        """
        link = self._opened(f"send of version {start.version}")
        with self._alone("send", start.timeout_s), torch.no_grad():
            if start.epoch <= self._last_epoch:
                raise WeightSyncError(
                    f"{self._place.name}: epoch {start.epoch} of version {start.version} is old; "
                    f"{self._last_epoch} was the last"
                )
            self._last_epoch = start.epoch
            try:
                return self._send(link, start)
            except BaseException as error:  # an interrupt of this process, too, must not leave the others waiting
                link.source.leave()
                if link.native is not None:
                    link.native.abort(f"{self._place.name}: {str(error) or type(error).__name__}")
                raise
            finally:
                link.source.end()

    def abort(self, reason: str) -> None:
        """Give up what is under way and tell the readers; from any thread, idempotent."""
        with self._guard:
            link = self._link
            self._given_up = self._given_up or reason
        if link is not None and link.native is not None:
            link.native.abort(reason)

    def signatures(self, timeout_s: float) -> Mapping[str, Sequence[float]]:
        """Return the signature of every tensor in its wire dtype; a collective where the source is sharded."""
        with self._alone("signatures", timeout_s), torch.no_grad():
            manifest = self._source.manifest()
            self._source.begin(timeout_s)
            try:
                return {
                    spec.name: signature_of(spec.name, self._source.tensors([index])[0].to(torch_dtype(spec)))
                    for index, spec in enumerate(manifest)
                }
            finally:
                self._source.end()

    def close(self) -> None:
        """Release link and memory, ending a call that is under way; idempotent."""
        with self._guard:
            link, self._link = self._link, None
        if link is not None and link.native is not None:
            link.native.close()
        # A call that is under way leaves by itself, when it fails; its group is not taken from under it.
        if link is not None and self._calling.acquire(blocking=False):
            try:
                link.source.leave()
            finally:
                self._calling.release()

    def _send(self, link: _Link, start: RefitStart) -> SendReport:
        transfer = _Transfer(link, self._place, lambda: self._given_up)
        begin = time.perf_counter()
        specs = link.plan.tensors
        with on_default_stream(memory_of(link.request.transport, self._place.device)):
            transfer.run(start)
            seconds = {"gather": transfer.gather_s}
            if link.native is None:
                return SendReport(bytes(DIGEST_BYTES * len(specs)), 0, seconds | {"total": time.perf_counter() - begin})
            finished = link.native.finish()
        own = specs[self._place.rank :: link.plan.num_roots]
        return SendReport(finished.digests, sum(num_bytes(spec) for spec in own), finished.seconds | seconds)

    def _source_of(self, request: OpenRequest) -> WeightSource:
        return SlicedSource(self._source, request.layout) if request.layout else self._source

    def _native(self, plan: Plan, request: OpenRequest) -> NativeSender:
        device, rank = self._place.device, self._place.rank
        options = link_options(request.transport, request.num_slots, len(request.readers), device, request.link)
        try:
            return NativeSender(plan, rank, _address(request, rank, options), options)
        except TransferError as error:
            if request.transport != "tcp" or not request.link.host:
                raise
            raise TransferError(f"policy.generation.refit_cfg.host={request.link.host}: {error}", error.kind) from error

    def _opened(self, what: str) -> _Link:
        with self._guard:
            link = self._link
        if link is None:
            raise WeightSyncError(f"{self._place.name}: {what}, but the sender is not open")
        return link

    @contextlib.contextmanager
    def _alone(self, what: str, timeout_s: float) -> Iterator[None]:
        if not self._calling.acquire(timeout=timeout_s):
            raise WeightSyncError(
                f"{self._place.name}: {what} waited {timeout_s:g} s in vain for an earlier call of a refit to end"
            )
        try:
            yield
        finally:
            self._calling.release()


class _Transfer:
    """One walk through the plan.

    All ranks of a sharded source walk together: before each step they agree to go on, so that a rank that failed leaves
    no other waiting in a collective. A step is one bucket of every root: gathered one after the other, packed at once.
    At most two buckets of whole tensors exist on a rank, and a tensor that is larger than a bucket.
    """

    def __init__(self, link: _Link, place: TrainerRank, given_up: Callable[[], str]) -> None:
        self._source = link.source
        self._plan = link.plan
        self._native = link.native
        self._rank = place.rank
        self._memory = memory_of(link.request.transport, place.device)
        self._given_up = given_up
        self._held: dict[int, Tensor] = {}
        self._failure: Exception | None = None
        self.gather_s = 0.0

    def run(self, start: RefitStart) -> None:
        """Send all buckets of this root.

        Raises:
            TransferError: "aborted" when another rank failed.
        """
        self._try(partial(self._begin, start))
        for step in self._steps():
            if not self._source.agree(self._is_well()):
                self._raise()
            own = self._gather(step)
            if own:
                self._try(partial(self._pack, own))
        if not self._source.agree(self._is_well()):
            self._raise()

    def _begin(self, start: RefitStart) -> None:
        self._source.begin(start.timeout_s)
        if self._native is not None:
            self._native.begin(start)

    def _try(self, work: Callable[[], None]) -> None:
        """Keep an error until all ranks know of it."""
        try:
            work()
        except Exception as error:
            self._failure = error

    def _is_well(self) -> bool:
        return self._failure is None and not self._given_up()

    def _raise(self) -> NoReturn:
        if self._failure is not None:
            raise self._failure
        raise TransferError(self._given_up() or "another trainer rank gave up; see its own error", "aborted")

    def _steps(self) -> list[list[int]]:
        """Numbers of the buckets of each step; the same on every rank of a sharded source."""
        plan = self._plan
        if self._failure is not None and not self._source.is_sharded:
            return []
        if self._source.is_sharded:
            rounds = zip_longest(*(plan.buckets_of(root) for root in range(plan.num_roots)))
            return [[number for number in numbers if number is not None] for numbers in rounds]
        own = list(plan.buckets_of(self._rank))
        is_free = self._source.holds_tensors and self._is_reachable()
        return ([own] if own else []) if is_free else [[number] for number in own]

    def _is_reachable(self) -> bool:
        return all(tensor.device == self._memory for tensor in self._source.tensors([0]))

    def _gather(self, step: Sequence[int]) -> list[int]:
        """Ask for the tensors that begin in these buckets; keep this root's, and return the numbers of its buckets."""
        begin = time.perf_counter()
        own = [number for number in step if self._plan.buckets[number].root == self._rank and self._native is not None]
        for number in step:
            indices = [piece.tensor for piece in self._plan.buckets[number].pieces if piece.tensor_offset == 0]
            tensors = self._source.tensors(indices, self._plan.buckets[number].root) if indices else []
            if number in own:
                self._held |= zip(indices, map(self._packable, indices, tensors), strict=True)
        self.gather_s += time.perf_counter() - begin
        return own

    def _packable(self, index: int, tensor: Tensor) -> Tensor:
        """The tensor where the link can read it; casts that it does not do itself are done here."""
        dtype = torch_dtype(self._plan.tensors[index])
        if not is_castable(tensor.dtype, dtype):
            tensor = tensor.to(dtype)
        return tensor.to(self._memory)

    def _pack(self, numbers: Sequence[int]) -> None:
        assert self._native is not None
        buckets = [self._plan.buckets[number] for number in numbers]
        self._native.send(numbers[0], [[self._held[piece.tensor] for piece in bucket.pieces] for bucket in buckets])
        for piece in (piece for bucket in buckets for piece in bucket.pieces):
            if piece.tensor_offset + piece.size == num_bytes(self._plan.tensors[piece.tensor]):
                del self._held[piece.tensor]


def _address(request: OpenRequest, rank: int, options: LinkOptions) -> str:
    if request.transport == "shm":
        return f"{request.channel}-{rank}"
    if request.transport == "tcp":
        return request.link.host or own_address()
    return nccl_unique_id(options.nccl_library)
