"""Both ends of a refit in this process, without a library: weights are words, the wire is a list.

They keep the contract of `rl.weights.transport` and check that others do: epochs grow, links are not used after a
failure, no replica is loaded while it generates. Faults are switched on by fields of `FakeReplica` and `FakeSender`.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.core.errors import InfraError
from rl.weights.faults import FIRST_READER, TransferError
from rl.weights.transport import (
    Ack,
    OpenRequest,
    ReceiverHandle,
    RefitStart,
    SendReport,
    TensorSpec,
    TransferInfo,
)

NAMES = tuple(f"model.layers.{index}.weight" for index in range(6))
MANIFEST = tuple(TensorSpec(name, "float32", (2, 2)) for name in NAMES)
Hook = Callable[[str], None]
SECONDS = {"copy": 0.25, "digest": 0.125, "wire": 0.5}


async def never() -> None:
    """Wait for what does not come."""
    await asyncio.Event().wait()


def word(name: str, version: int) -> str:
    """The weights of a tensor."""
    return f"{name}@{version}"


def digests_of(words: Sequence[str]) -> bytes:
    """Eight bytes per tensor."""
    return b"".join(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in words)


class Wire:
    """One set of links: words in order, a window of two, and the first fault for everybody."""

    def __init__(self, num_readers: int) -> None:
        self.words: list[str] = []
        self.taken = [0] * num_readers
        self.joined = 0
        self.epoch = 0
        self.fault: TransferError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def change(self) -> None:
        """Let everybody look again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def break_off(self, fault: TransferError) -> None:
        """End the links for everybody; the first fault counts."""
        self.fault = self.fault or fault
        self.change()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait; a fault ends it."""
        while not condition():
            if self.fault is not None:
                raise self.fault
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        if self.fault is not None:
            raise self.fault


class FakeSender:
    """A SenderHandle whose tensors all have the version that is sent."""

    def __init__(self) -> None:
        self.manifest_now = MANIFEST
        self.wire: Wire | None = None
        self.requests: list[OpenRequest] = []
        self.epochs: list[int] = []
        self.at: Hook = lambda phase: None
        self.hang_at: str | None = None
        self.signed: dict[str, Sequence[float]] = {name: (1.0, 1.0) for name in NAMES}
        self.is_closed = False
        self.wires: dict[str, Wire] = {}

    async def _enter(self, phase: str) -> None:
        self.at(phase)
        if phase == self.hang_at:
            await never()

    async def manifest(self) -> tuple[TensorSpec, ...]:
        return self.manifest_now

    async def open(self, request: OpenRequest) -> TransferInfo:
        await self._enter("open")
        self.requests.append(request)
        self.wire = self.wires[request.channel] = Wire(len(request.readers))
        return TransferInfo(
            request.transport,
            (request.channel,),
            b"",
            "0" * 16,
            request.num_slots,
            request.readers,
            request.timeout_s,
            request.link,
        )

    async def join(self) -> None:
        await self._enter("join")
        wire = self._wire()
        await wire.until(lambda: wire.joined == len(wire.taken))

    async def send(self, start: RefitStart) -> SendReport:
        wire = self._wire()
        assert start.epoch > max(self.epochs, default=0), "an epoch came twice"
        self.epochs.append(start.epoch)
        wire.epoch = start.epoch
        sent = [word(name, start.version) for name in NAMES]
        for position, one in enumerate(sent):
            await self._enter(f"send {position}")
            await wire.until(lambda position=position: min(wire.taken) >= position - 2)  # type: ignore[misc]
            wire.words.append(one)
            wire.change()
            await asyncio.sleep(0)
        await wire.until(lambda: min(wire.taken) == len(sent))
        return SendReport(digests_of(sent), 96, {**SECONDS, "gather": 0.75})

    async def abort(self, reason: str) -> None:
        if self.wire is not None:
            self.wire.break_off(TransferError(reason))

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        return self.signed

    async def close(self) -> None:
        self.is_closed = True

    def _wire(self) -> Wire:
        assert self.wire is not None and self.wire.fault is None, "links were used after a failure"
        return self.wire


@dataclass
class FakeReplica:
    """A ReceiverHandle and its engine; `at(phase)` may raise."""

    replica: str
    sender: FakeSender
    num_readers: int = 1
    is_paused: bool = False
    modes: list[str] = field(default_factory=list)
    at: Hook = lambda phase: None
    hang_at: str | None = None
    is_stopped: bool = False
    is_dead: bool = False
    laziness: int = 0
    change: Callable[[str], str] = lambda one: one
    change_ack: Callable[[Ack], Ack | None] = lambda ack: ack
    weights: dict[str, str] = field(default_factory=dict)
    version: int = -1
    first: int = 0
    signed: dict[str, Sequence[float]] = field(default_factory=lambda: {name: (1.0, 1.0) for name in NAMES})
    _wire: Wire | None = None
    _start: RefitStart | None = None

    def die(self) -> None:
        """End the process; the other end of its links notices."""
        self.is_dead = True
        if self._wire is not None:
            self._wire.break_off(TransferError("a reader's process ended", "peer lost", FIRST_READER + self.first, 1))

    async def pause(self, mode: str) -> None:
        await self._enter("pause")
        self.is_paused = True
        self.modes.append(mode)

    async def resume(self) -> None:
        await self._enter("resume")
        self.is_paused = False

    async def init(self, info: TransferInfo, first_reader: int) -> None:
        await self._enter("init")
        self.first = first_reader
        self._wire = self.sender.wires[info.addresses[0]]
        self._wire.joined += self.num_readers
        self._wire.change()

    async def start(self, start: RefitStart) -> None:
        await self._enter("start")
        assert self.is_paused, "a refit began while the engine generates"
        self._start = start

    async def update(self) -> None:
        wire = self._wire
        assert wire is not None and self._start is not None
        for position, name in enumerate(NAMES):
            await self._enter(f"update {position}")
            for _ in range(self.laziness):
                await asyncio.sleep(0)
            await wire.until(lambda position=position: len(wire.words) > position)  # type: ignore[misc]
            assert wire.epoch == self._start.epoch
            self.weights[name] = self.change(wire.words[position])
            for reader in range(self.num_readers):
                wire.taken[self.first + reader] = position + 1
            wire.change()

    async def finish(self, version: int) -> Ack | None:
        await self._enter("finish")
        assert self._wire is not None
        self._wire.words.clear()
        self._wire.taken = [0] * len(self._wire.taken)
        self.version = version
        table = digests_of([self.weights[name] for name in NAMES])
        ack = Ack(self.replica, version, len(NAMES), (table,) * self.num_readers, {**SECONDS, "wire": 1.5, "load": 2.0})
        return self.change_ack(ack)

    async def abort(self, reason: str) -> None:
        if self.is_stopped:
            await never()
        if self._wire is not None and not self.is_dead:
            self._wire.break_off(TransferError(reason))

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        return self.signed

    def heal(self) -> None:
        """Forget every fault."""
        self.at, self.hang_at, self.is_stopped, self.laziness = (lambda phase: None), None, False, 0
        self.change, self.change_ack = (lambda one: one), (lambda ack: ack)

    async def _enter(self, phase: str) -> None:
        self.at(phase)
        if self.is_stopped or phase == self.hang_at:
            await never()
        if self.is_dead:
            raise InfraError(f"{self.replica} died during {phase}")


class FakeServer(FakeReplica):
    """A server that others started."""

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)


class FakeFleet:
    """A generator that knows who is left."""

    def __init__(self, sender: FakeSender, num_replicas: int, num_readers: int = 1) -> None:
        self.removed: dict[str, str] = {}
        self.replicas = [FakeReplica(f"generation[{rank}]", sender, num_readers) for rank in range(num_replicas)]

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def is_paused(self) -> bool:
        """Whether nobody generates."""
        return all(replica.is_paused or replica.is_dead for replica in self.replicas)

    def weight_receivers(self) -> list[ReceiverHandle]:
        receivers: list[Any] = list(self.replicas)
        return receivers

    async def remove_replica(self, name: str, reason: str) -> None:
        self.removed[name] = reason
        self.replicas = [replica for replica in self.replicas if replica.replica != name]

    def sampled(self) -> list[tuple[str, int]]:
        """What every engine that is not paused would sample with now; mixed weights are an error."""
        generating = [replica for replica in self.replicas if not replica.is_paused]
        for replica in generating:
            versions = {text.rpartition("@")[2] for text in replica.weights.values()}
            assert len(versions) <= 1, f"{replica.replica} generates with the versions {versions}"
        return [(replica.replica, replica.version) for replica in generating if replica.weights]


def run(work: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
    """Run to the end, or to the deadline of the test."""
    return asyncio.run(asyncio.wait_for(work, timeout_s))
