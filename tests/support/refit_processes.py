"""Ends of a refit in processes of their own, which a test may kill or stop at a bucket of its choice.

    with SenderProcess(seed=1) as sender, ReceiverProcess("generation[0]") as receiver:
        info = connect(sender, [receiver], "shm")
        refit(sender, [receiver], RefitStart(1, 1, 20.0))

Every call returns a future, so that calls of several ends, or an abort beside a send, run at the same time. An end can
be told to halt before a tensor: it says so, and goes on only when the test wants it to.
"""

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from rl.weights.native import digests_of
from rl.weights.receiver import InPlace, Received, Staged, WeightReceiver
from rl.weights.sender import WeightSender
from rl.weights.source import LocalSource
from rl.weights.transport import LinkSettings, OpenRequest, RefitStart, TransferInfo, TransportName

TIMEOUT_S = 30.0
# For an answer; the first one comes after the process has started, which takes long on a busy machine.
WAIT_S = 120.0
# Shared memory is one for test processes that run beside each other, which may have the same pid in their sandboxes.
_OURS = f"tdm-test-{secrets.token_hex(6)}"
NUM_TENSORS = 24
BUCKET_BYTES = 1 << 16
# Halts before it: buckets before and after it are on their way.
MIDDLE = "layers.11.weight"


def make_tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A model of about 2 MiB with shapes of every kind."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layers.{number}.weight": torch.randn(150, 150, generator=generator).to(dtype) for number in range(NUM_TENSORS)
    }
    tensors["embed"] = torch.randn(500, 130, generator=generator)  # more than three buckets
    tensors["turned"] = torch.randn(40, 30, generator=generator).t()
    return tensors | {"scale": torch.tensor(float(seed)), "none": torch.empty(0, 3), "steps": torch.tensor([seed])}


def digests(tensors: dict[str, Tensor]) -> bytes:
    """Of every tensor in order."""
    return digests_of([tensor.contiguous() for tensor in tensors.values()])


class Halt:
    """A place at which an end waits for the test."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.before = ""
        self.go_on = threading.Event()
        self._say = say

    def pass_by(self, names: Sequence[str]) -> None:
        if self.before in names:
            self._say("halted")
            self.go_on.wait(TIMEOUT_S)


class End:
    """What both ends can be asked."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.halt = Halt(say)

    def halt_before(self, name: str) -> None:
        self.halt.before = name
        self.halt.go_on.clear()

    def go_on(self) -> None:
        self.halt.before = ""
        self.halt.go_on.set()

    def usage(self) -> tuple[int, int]:
        """Resident bytes, and open files."""
        process = psutil.Process()
        return process.memory_info().rss, process.num_fds()


class HaltingSource(LocalSource):
    """Is asked bucket by bucket, and halts."""

    def __init__(self, tensors: dict[str, Tensor], halt: Halt) -> None:
        super().__init__(lambda: tensors)
        self._names = list(tensors)
        self._halt = halt

    @property
    def holds_tensors(self) -> bool:
        return False

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        self._halt.pass_by([self._names[index] for index in indices])
        return super().tensors(indices, root)


class SendingEnd(End):
    """A trainer."""

    def __init__(self, say: Callable[[str], None], seed: int) -> None:
        super().__init__(say)
        self.tensors = make_tensors(seed)
        self.sender = WeightSender(HaltingSource(self.tensors, self.halt))

    def open(self, request: OpenRequest) -> TransferInfo:
        plan, digest = self.sender.plan(request)
        address = self.sender.open(plan, digest, request)
        timeout_s = request.timeout_s
        return TransferInfo(
            request.transport, (address,), plan, digest, request.num_slots, request.readers, timeout_s, request.link
        )

    def join(self) -> None:
        self.sender.join()

    def send(self, start: RefitStart) -> bytes:
        return self.sender.send(start).digests

    def change(self, seed: int) -> bytes:
        for name, tensor in make_tensors(seed).items():
            self.tensors[name].copy_(tensor)
        return digests(self.tensors)

    def repeat(self, start: RefitStart, times: int) -> tuple[list[tuple[int, int]], bytes]:
        """Send so often; what this process holds after every tenth of them, and what was sent last."""
        usages = []
        sent = b""
        for number in range(times):
            sent = self.sender.send(replace(start, epoch=start.epoch + number)).digests
            if (number + 1) % max(1, times // 10) == 0:
                usages.append(self.usage())
        return usages, sent

    def abort(self, reason: str) -> None:
        self.sender.abort(reason)

    def close(self) -> None:
        self.sender.close()


class ReceivingEnd(End):
    """An engine rank: in place, or by a loader that keeps what it gets."""

    def __init__(self, say: Callable[[str], None], name: str, is_staged: bool, dtype: torch.dtype) -> None:
        super().__init__(say)
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(0, dtype).items()}
        sink = Staged(self._load, keeps_tensors=True) if is_staged else InPlace(self.tensors)
        self.receiver = WeightReceiver(sink, name)

    def init(self, info: TransferInfo, reader: int) -> None:
        self.receiver.init(info, reader)

    def update(self, start: RefitStart) -> None:
        self.receiver.start(start)
        self.receiver.update()

    def finish(self) -> Received:
        return self.receiver.finish()

    def held(self) -> bytes:
        return digests(self.tensors)

    def repeat(self, start: RefitStart, times: int) -> tuple[list[tuple[int, int]], bytes]:
        """Receive so often; see `SendingEnd.repeat`."""
        usages = []
        for number in range(times):
            self.update(replace(start, epoch=start.epoch + number))
            self.receiver.finish()
            if (number + 1) % max(1, times // 10) == 0:
                usages.append(self.usage())
        return usages, self.held()

    def abort(self, reason: str) -> None:
        self.receiver.abort(reason)

    def close(self) -> None:
        self.receiver.close()

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        self.halt.pass_by([name for name, _ in tensors])
        self.tensors |= dict(tensors)


class EndProcess:
    """A process with one end; use as a context manager, which leaves no process behind.

    Attributes:
        halted: Set when the end has come to where it should halt.
    """

    def __init__(self, kind: Callable[..., End], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.halted = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the end on a thread of its own."""
        future: Future[Any] = Future()
        with self._lock:
            number = len(self._futures)
            self._futures[number] = future
        with contextlib.suppress(OSError):
            self._pipe.send((number, method, arguments))
        return future

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.join(10.0)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reading.join(10.0)
        self._pipe.close()

    def _read(self) -> None:
        try:
            while True:
                number, is_well, value = self._pipe.recv()
                if number < 0:
                    self.halted.set()
                elif is_well:
                    self._futures[number].set_result(value)
                else:
                    self._futures[number].set_exception(value)
        except (EOFError, OSError):
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(ProcessLookupError(f"process {self.pid} has ended"))


class SenderProcess(EndProcess):
    """A trainer."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(SendingEnd, seed)


class ReceiverProcess(EndProcess):
    """An engine rank."""

    def __init__(self, name: str, *, is_staged: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(ReceivingEnd, name, is_staged, dtype)


def request_of(
    transport: TransportName, num_readers: int, channel: str | None = None, timeout_s: float = TIMEOUT_S
) -> OpenRequest:
    """A request for links of this host."""
    readers = tuple(f"generation[{number}]" for number in range(num_readers))
    name = channel or channel_name()
    return OpenRequest(transport, name, BUCKET_BYTES, 2, readers, timeout_s, LinkSettings(3.0, host="127.0.0.1"))


def connect(sender: EndProcess, receivers: Sequence[EndProcess], request: OpenRequest) -> TransferInfo:
    """Open the sender and let all join."""
    info: TransferInfo = sender.call("open", request).result(WAIT_S)
    joins = [receiver.call("init", info, reader) for reader, receiver in enumerate(receivers)]
    for future in (*joins, sender.call("join")):
        future.result(WAIT_S)
    return info


def refit(sender: EndProcess, receivers: Sequence[EndProcess], start: RefitStart) -> None:
    """One refit; all hold what was sent."""
    calls = [sender.call("send", start), *(receiver.call("update", start) for receiver in receivers)]
    sent = [call.result(WAIT_S) for call in calls][0]
    for receiver in receivers:
        assert receiver.call("finish").result(WAIT_S).digests == sent
        assert receiver.call("held").result(WAIT_S) == sent


def channel_name() -> str:
    """A name by which a segment can be known as this test process's."""
    return f"{_OURS}-{secrets.token_hex(6)}"


def segments() -> set[str]:
    """Names in shared memory that tests of this process made."""
    return {path.name for path in Path("/dev/shm").glob(f"*{_OURS}-*")}


def _serve(pipe: Connection, kind: Callable[..., End], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    sending = threading.Lock()

    def say(number: int, is_well: bool, value: Any) -> None:
        with sending, contextlib.suppress(OSError):
            pipe.send((number, is_well, value))

    end = kind(lambda event: say(-1, True, event), *arguments)

    def run(number: int, method: str, values: tuple[Any, ...]) -> None:
        try:
            result = methodcaller(method, *values)(end)
        except Exception as error:
            say(number, False, error)
        else:
            say(number, True, result)

    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        threading.Thread(target=run, args=call, daemon=True).start()
