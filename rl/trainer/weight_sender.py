"""The trainer's end of a refit as the driver sees it: all ranks of the policy's workers behind one handle.

Every call goes to all ranks, because sharded weights move in lockstep; a rank that does not send answers at once. It
holds no state: what is open is known to the workers.
"""

import asyncio
from collections.abc import Mapping, Sequence

from rl.cluster.worker_group import WorkerGroup
from rl.core.errors import FatalError
from rl.trainer.worker import PolicyWorker
from rl.weights.faults import TransferError
from rl.weights.transport import OpenRequest, RefitStart, SendReport, TensorSpec, TransferInfo

# Calls that a worker serves beside the one that sends: an abort, and a close.
SENDER_CALLS = 2
# How long the other ranks may take, in seconds, to say why they failed, once one has and all were told to give up.
_GRACE_S = 5.0


class WorkerSender:
    """A SenderHandle over the policy's workers."""

    def __init__(self, group: WorkerGroup[PolicyWorker]) -> None:
        self._group = group

    async def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order."""
        return await self._group.call(0, PolicyWorker.sender_manifest)

    async def open(self, request: OpenRequest) -> TransferInfo:
        """Let rank 0 plan, and every root make its link; earlier ones are closed."""
        plan, digest = await self._group.call(0, PolicyWorker.sender_plan, request)
        addresses = await self._group.broadcast(PolicyWorker.sender_open, plan, digest, request)
        return TransferInfo(
            request.transport,
            tuple(address for address in addresses if address),
            plan,
            digest,
            request.num_slots,
            request.readers,
            request.timeout_s,
            request.link,
        )

    async def join(self) -> None:
        """Wait until every reader has joined every root."""
        await self._group.broadcast(PolicyWorker.sender_join)

    async def send(self, start: RefitStart) -> SendReport:
        """Send on all ranks; the first failure ends the others, and the error that tells most is raised."""
        calls = [
            asyncio.ensure_future(self._group.call(rank, PolicyWorker.sender_send, start))
            for rank in range(self._group.world_size)
        ]
        try:
            done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for call in done if (error := call.exception()) is not None]
            if errors and running:
                await self.abort(f"another trainer rank failed: {errors[0]}")
                done, _ = await asyncio.wait(running, timeout=_GRACE_S)
                errors += [error for call in done if (error := call.exception()) is not None]
        finally:
            for call in calls:
                call.cancel()
        if errors:
            raise min(errors, key=_tells_little)
        return merge_reports([call.result() for call in calls])

    async def abort(self, reason: str) -> None:
        """Tell every rank to give up, beside `send`; a rank that is gone does not keep the others from hearing it."""
        ranks = range(self._group.world_size)
        calls = [self._group.call(rank, PolicyWorker.sender_abort, reason) for rank in ranks]
        await asyncio.gather(*calls, return_exceptions=True)

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        """Return the signature of every tensor."""
        return (await self._group.broadcast(PolicyWorker.sender_signatures))[0]

    async def close(self) -> None:
        """Release links and memory on every rank."""
        await self._group.broadcast(PolicyWorker.sender_close)


def merge_reports(reports: Sequence[SendReport]) -> SendReport:
    """Join what the roots sent: each has digests of its own tensors and zeros elsewhere; times are the slowest root's.

    Raises:
        FatalError: reports of different manifests.
    """
    sizes = {len(report.digests) for report in reports}
    if len(sizes) != 1:
        raise FatalError(f"trainer ranks report digests of {sorted(sizes)} bytes; they sent different manifests")
    digests = 0
    for report in reports:
        digests |= int.from_bytes(report.digests, "little")
    parts = {part for report in reports for part in report.seconds}
    return SendReport(
        digests.to_bytes(sizes.pop(), "little"),
        sum(report.num_bytes for report in reports),
        {part: max(report.seconds.get(part, 0.0) for report in reports) for part in sorted(parts)},
    )


def _tells_little(error: BaseException) -> bool:
    """Whether an error only says that somebody else gave up."""
    return isinstance(error, TransferError) and error.kind == "aborted"
