"""The processes between which bench_refit.py moves weights: number 0 sends, the others receive.

Each holds the tensors of one manifest and does what it is told over a pipe, one order at a time. Links stay open
between orders, as they do between the refits of a run. The driver is `Fleet`.

    with Fleet(manifest, num_readers=1) as fleet:
        fleet.open("shm", LinkSpec("shm", 1 << 20, 4))
        runs = fleet.refit("shm")          # one Run per process
"""

import contextlib
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from rl.weights.native import LinkOptions, NativeReceiver, NativeSender, Plan, digests_of
from rl.weights.transport import RefitStart, TensorSpec, TransportName

# Far beyond what any order takes: a bench that hangs ends.
_PATIENCE_S = 300.0
_MEGABYTE = 1e6


@dataclass(frozen=True)
class LinkSpec:
    """A link of the native transport: its backend, the size of a bucket, how many slots, digests or not."""

    transport: TransportName
    bucket_bytes: int
    num_slots: int
    digests: bool = True


class Run(NamedTuple):
    """What one process did in one transfer.

    Attributes:
        seconds: Its parts: copy, digest, wire, total; empty where they are not known.
        digests: Of every tensor, by the transport's own account; empty where it has none.
    """

    seconds: dict[str, float]
    digests: bytes


class _End:
    """One process: its tensors, its links, its part of every transfer."""

    def __init__(self, rank: int, world: int, manifest: Sequence[TensorSpec]) -> None:
        self._rank, self._world = rank, world
        self._manifest = manifest
        self._tensors = _random_tensors(manifest) if rank == 0 else _empty_tensors(manifest)
        self._links: dict[str, NativeSender | NativeReceiver] = {}
        self._buckets: dict[str, list[list[Tensor]]] = {}
        self._epoch = 0

    def open(self, name: str, spec: LinkSpec, address: str) -> str:
        """Make this end of a link; the sender returns where it is found."""
        plan = Plan.build(self._manifest, spec.bucket_bytes)
        options = LinkOptions(spec.transport, spec.num_slots, self._world - 1, digests=spec.digests, silence_s=600.0)
        link: NativeSender | NativeReceiver
        if self._rank == 0:
            link = NativeSender(plan, 0, address, options)
            address = link.address
        else:
            link = NativeReceiver(plan, self._rank - 1, [address], options)
        self._links[name] = link
        self._buckets[name] = [[self._tensors[piece.tensor] for piece in bucket.pieces] for bucket in plan.buckets]
        return address

    def join(self, name: str) -> None:
        """Wait for the other ends."""
        self._links[name].join(_PATIENCE_S)

    def refit(self, name: str) -> Run:
        """Move all tensors once."""
        link, buckets = self._links[name], self._buckets[name]
        self._epoch += 1
        link.begin(RefitStart(self._epoch, self._epoch, _PATIENCE_S))
        if isinstance(link, NativeSender):
            link.send(0, buckets)
        else:
            link.receive(0, buckets)
        finished = link.finish()
        return Run(finished.seconds, finished.digests)

    def join_gloo(self, store: str) -> None:
        """Form a gloo group of all processes."""
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=self._rank, world_size=self._world)

    def gloo(self) -> Run:
        """Broadcast tensor by tensor."""
        for tensor in self._tensors:
            dist.broadcast(tensor, 0)
        return Run({}, b"")

    def clear(self) -> None:
        """Overwrite what was received."""
        if self._rank > 0:
            for tensor in self._tensors:
                tensor.zero_()

    def digests(self) -> bytes:
        """Look at what is really there."""
        return digests_of(self._tensors)

    def mark_memory(self) -> int:
        """Let the high-water mark begin anew; return what is held."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")

    def peak_memory(self) -> int:
        """Return the high-water mark."""
        return _status_bytes("VmHWM")

    def close(self, name: str) -> None:
        """Release a link."""
        self._buckets.pop(name, None)
        link = self._links.pop(name, None)
        if link is not None:
            link.close()

    def end(self) -> None:
        """Release everything."""
        for name in list(self._links):
            self.close(name)
        if dist.is_initialized():
            dist.destroy_process_group()


def _random_tensors(manifest: Sequence[TensorSpec]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = _empty_tensors(manifest)
    for tensor in tensors:
        tensor.normal_(generator=generator)
    return tensors


def _empty_tensors(manifest: Sequence[TensorSpec]) -> list[Tensor]:
    return [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in manifest]


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def _serve(pipe: Connection, rank: int, world: int, manifest: Sequence[TensorSpec]) -> None:
    """Carry out orders until the pipe ends; an error is the answer to the order that raised it."""
    torch.set_num_threads(1)
    end = _End(rank, world, manifest)
    try:
        while True:
            verb, arguments = pipe.recv()
            try:
                pipe.send((getattr(end, verb)(*arguments), None))
            except Exception as error:  # the driver raises it
                pipe.send((None, f"process {rank}, {verb}: {type(error).__name__}: {error}"))
    except EOFError:
        end.end()


class Fleet:
    """The driver's handle of one sender and its readers."""

    def __init__(self, manifest: Sequence[TensorSpec], num_readers: int) -> None:
        context = get_context("spawn")
        self._world = 1 + num_readers
        self._scratch = tempfile.TemporaryDirectory(prefix="tandem-bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._world, manifest), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
        self._scratch.cleanup()

    def open(self, name: str, spec: LinkSpec) -> None:
        """Make a link between the sender and all readers."""
        place = "127.0.0.1" if spec.transport == "tcp" else f"tandem-bench-{os.getpid()}-{time.monotonic_ns()}"
        address = self._order(0, "open", name, spec, place)
        for rank in range(1, self._world):
            self._order(rank, "open", name, spec, address)
        self._all("join", name)

    def refit(self, name: str) -> list[Run]:
        """Move the sender's tensors over a link."""
        runs: list[Run] = self._all("refit", name)
        if any(run.digests != runs[0].digests for run in runs):
            raise RuntimeError(f"{name}: the digests of {self._world} processes differ")
        return runs

    def join_gloo(self) -> None:
        """Form the group of the naive way."""
        self._all("join_gloo", str(Path(self._scratch.name) / "store"))

    def gloo(self) -> list[Run]:
        """Broadcast tensor by tensor."""
        runs: list[Run] = self._all("gloo")
        return runs

    def clear(self) -> None:
        """Overwrite what the readers have."""
        self._all("clear")

    def digests(self) -> list[bytes]:
        """Return the digests of the tensors that each process holds."""
        digests: list[bytes] = self._all("digests")
        return digests

    def mark_memory(self) -> list[int]:
        """Return the bytes that each process holds; its high-water mark begins anew."""
        held: list[int] = self._all("mark_memory")
        return held

    def peaks_mb(self, held: Sequence[int]) -> list[float]:
        """Return how far each process rose above `held`, in megabytes; pages of shared memory count for each."""
        return [max(0, peak - before) / _MEGABYTE for peak, before in zip(self._all("peak_memory"), held, strict=True)]

    def close(self, name: str) -> None:
        """Release a link on all sides."""
        self._all("close", name)

    def _all(self, verb: str, *arguments: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((verb, arguments))
        return [self._answer(rank) for rank in range(self._world)]

    def _order(self, rank: int, verb: str, *arguments: object) -> Any:
        self._pipes[rank].send((verb, arguments))
        return self._answer(rank)

    def _answer(self, rank: int) -> Any:
        with contextlib.suppress(EOFError):
            if self._pipes[rank].poll(_PATIENCE_S):
                answer, error = self._pipes[rank].recv()
                if error is not None:
                    raise RuntimeError(error)
                return answer
        raise RuntimeError(f"process {rank} of the benchmark does not answer")


def without_digests(spec: LinkSpec) -> LinkSpec:
    """Return the same link with digests off."""
    return replace(spec, digests=False)
