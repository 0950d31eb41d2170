"""Senders and receivers of one refit in this process, a thread each, over a real transport of the loopback.

with ConnectedEnds([WeightSender(source)], [WeightReceiver(InPlace(targets), "generation[0]")]) as ends:
    reports, received = ends.refit(1)
"""

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self, TypeVar

from rl.core.reaper import SHARED_MEMORY
from rl.weights.receiver import Received, WeightReceiver
from rl.weights.sender import WeightSender
from rl.weights.transport import (
    LinkSettings,
    OpenRequest,
    RefitStart,
    SendReport,
    StoredTensor,
    TransferInfo,
    TransportName,
)

T = TypeVar("T")
TIMEOUT_S = 30.0


class ConnectedEnds:
    """Opens and joins at once; an epoch is one more than the one before."""

    def __init__(
        self,
        senders: Sequence[WeightSender],
        receivers: Sequence[WeightReceiver],
        transport: TransportName = "shm",
        *,
        bucket_bytes: int = 4096,
        num_roots: int = 0,
        layout: tuple[StoredTensor, ...] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.senders, self.receivers = senders, receivers
        self.timeout_s = timeout_s
        self.epoch = 0
        self._name = f"tdm-test-{secrets.token_hex(6)}"
        self._num_opened = 0
        self.request = OpenRequest(
            transport,
            self._name,
            bucket_bytes,
            2,
            tuple(f"generation[{number}]" for number in range(len(receivers))),
            timeout_s,
            LinkSettings(timeout_s, host="127.0.0.1"),
            num_roots,
            layout,
        )
        self._pool = ThreadPoolExecutor(len(senders) + len(receivers))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> TransferInfo:
        """Make new links, under a name of their own, and let everybody join."""
        self._num_opened += 1
        self.request = replace(self.request, channel=f"{self._name}-{self._num_opened}")
        plan, digest = self.senders[0].plan(self.request)
        addresses = self.together(
            [lambda sender=sender: sender.open(plan, digest, self.request) for sender in self.senders]
        )
        self.info = TransferInfo(
            self.request.transport,
            tuple(address for address in addresses if address),
            plan,
            digest,
            self.request.num_slots,
            self.request.readers,
            self.timeout_s,
            self.request.link,
        )
        inits = [
            lambda end=end, reader=reader: end.init(self.info, reader) for reader, end in enumerate(self.receivers)
        ]
        self.together([*inits, *(sender.join for sender in self.senders)])
        return self.info

    def refit(self, version: int) -> tuple[list[SendReport], list[Received]]:
        """One refit of all ends; the first error of any is raised once all have ended."""
        start = self.start(version)
        results = self.together([*self.sends(start), *self.updates(start)])
        reports = results[: len(self.senders)]
        return reports, [receiver.finish() for receiver in self.receivers]

    def start(self, version: int) -> RefitStart:
        """The next attempt."""
        self.epoch += 1
        return RefitStart(self.epoch, version, self.timeout_s)

    def sends(self, start: RefitStart) -> list[Callable[[], Any]]:
        """One call per sender."""
        return [lambda sender=sender: sender.send(start) for sender in self.senders]

    def updates(self, start: RefitStart) -> list[Callable[[], Any]]:
        """One call per receiver."""

        def update(receiver: WeightReceiver) -> None:
            receiver.start(start)
            receiver.update()

        return [lambda receiver=receiver: update(receiver) for receiver in self.receivers]

    def outcomes(self, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Run calls on a thread each; an error is a result."""
        futures = [self._pool.submit(call) for call in calls]
        outcomes: list[T | BaseException] = []
        for future in futures:
            error = future.exception(self.timeout_s + TIMEOUT_S)
            outcomes.append(future.result() if error is None else error)
        return outcomes

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls on a thread each and return their results."""
        results: list[T] = []
        for outcome in self.outcomes(calls):
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    def close(self) -> None:
        """Release everything; nothing of it stays in shared memory."""
        for end in (*self.receivers, *self.senders):
            end.close()
        self._pool.shutdown()
        assert not list(SHARED_MEMORY.glob(f"*{self._name}*"))
