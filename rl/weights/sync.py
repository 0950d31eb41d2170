"""WeightSync: the driver-side transaction that brings a new version of the policy to every generator.

    sync = WeightSync(policy.weight_sender(), generator, config.refit_cfg, run_tag, clock)
    await sync.connect()
    await sync.publish(version=0)          # also once before the first rollout

publish: pause -> start -> [pack(i) overlaps update(i-1), two slots] -> finish -> every acknowledgement equals what was
sent -> resume. Either every replica holds the new version and generates, or WeightSyncError is raised and none does:
the generator stays paused. A later publish starts from the beginning. It sees no tensor.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from rl.core.clock import Clock
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import WeightSyncError
from rl.core.types import PolicyVersion
from rl.weights.config import RefitConfig
from rl.weights.plan import ALIGNMENT, BucketPlan, align, plan_buckets
from rl.weights.transport import Ack, ReceiverHandle, SenderHandle, TransferInfo

T = TypeVar("T")
NUM_SLOTS = 2


class Refittable(Protocol):
    """What a refit needs of a generator."""

    async def pause(self, mode: Literal["drain", "keep", "abort"]) -> None:
        """Stop generating."""
        ...

    async def resume(self) -> None:
        """Generate again."""
        ...

    def weight_receivers(self) -> list[ReceiverHandle]:
        """One handle per replica."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """One completed refit; `bytes` and `tensors` are those of one copy of the model."""

    version: PolicyVersion
    seconds: float
    bytes: int
    tensors: int
    checksum: str
    replicas: int


class WeightSync:
    """Moves weights from one sender to all replicas of a generator, all or none.

    Args:
        sender: The trainer's end.
        generator: Paused during a refit and resumed only after success.
        config: Bucket size, deadline and pause mode.
        run_tag: Prefix of the transport's address, so that leftovers of the run can be found.
        clock: Measures the refit.
    """

    def __init__(
        self, sender: SenderHandle, generator: Refittable, config: RefitConfig, run_tag: str, clock: Clock
    ) -> None:
        self._sender = sender
        self._generator = generator
        self._config = config
        self._run_tag = run_tag
        self._clock = clock
        self._plan: BucketPlan | None = None
        self._info: TransferInfo | None = None
        self._receivers: list[ReceiverHandle] = []
        self._phase = "connect"

    async def connect(self) -> None:
        """Agree on manifest and plan with both ends and open the transport; once, or again after a replica changed.

        Raises:
            WeightSyncError: no replica, plans that differ, no memory for the ring, or the deadline passed.
        """
        async with _Deadline(self, "connect"):
            self._phase = "reading the manifest of the sender"
            manifest = await self._sender.manifest()
            whole = plan_buckets(manifest, align(int(self._config.bucket_mib * (1 << 20)) or ALIGNMENT))
            used = max(align(piece.slot_offset + piece.size) for bucket in whole.buckets for piece in bucket)
            # A model smaller than one bucket needs no ring of the configured size.
            plan = whole if len(whole.buckets) > 1 else plan_buckets(manifest, max(used, ALIGNMENT))
            channel = f"{self._run_tag}-refit-{uuid.uuid4().hex[:8]}"
            info = TransferInfo(channel, manifest, plan.bucket_bytes, NUM_SLOTS, plan.digest)
            self._receivers = self._generator.weight_receivers()
            if not self._receivers:
                raise WeightSyncError("the generator has no replica; a refit would update nothing")
            self._phase = "opening the sender"
            await self._sender.open(info)
            await self._all("init", [(receiver, receiver.init(info)) for receiver in self._receivers])
            self._plan, self._info = plan, info

    async def publish(self, version: PolicyVersion) -> SyncReport:
        """Bring `version` to every replica.

        Raises:
            WeightSyncError: anything failed, was late or did not agree; names version, replica and bucket. The
                generator stays paused and the same call may be made again.
        """
        plan, info = self._plan, self._info
        if plan is None or info is None:
            raise WeightSyncError(f"refit of version {version} before connect()")
        start = self._clock.now()
        async with _Deadline(self, f"refit of version {version}"):
            self._phase = f"pausing the generator ({self._config.pause_mode})"
            await self._generator.pause(self._config.pause_mode)
            self._phase = "starting the sender"
            await self._sender.start(version)
            await self._all("start", [(receiver, receiver.start(version)) for receiver in self._receivers])
            await self._transfer(len(plan.buckets))
            self._phase = "finishing the sender"
            checksum = await self._sender.finish()
            acks = await self._all("finish", [(receiver, receiver.finish(version)) for receiver in self._receivers])
            _check_acks(acks, version, len(info.tensors), checksum, len(self._receivers))
            self._phase = "resuming the generator"
            await self._generator.resume()
        seconds = self._clock.now() - start
        return SyncReport(version, seconds, plan.total_bytes, len(info.tensors), checksum, len(acks))

    async def close(self) -> None:
        """Release the transport's buffers; idempotent."""
        self._plan = self._info = None
        await self._sender.close()

    async def _transfer(self, num_buckets: int) -> None:
        """Pack bucket i while the replicas load bucket i-1: they use different slots."""
        await self._pack(0)
        for bucket in range(num_buckets):
            calls = [(receiver, receiver.update(bucket)) for receiver in self._receivers]
            work: list[Coroutine[Any, Any, Any]] = [self._all(f"update with bucket {bucket}", calls)]
            if bucket + 1 < num_buckets:
                work.append(self._pack(bucket + 1))
            # Both ends are awaited together: whichever fails first is reported at once, not as the other's silence.
            await gather_or_cancel(work)

    async def _pack(self, bucket: int) -> None:
        try:
            await self._sender.pack(bucket)
        except asyncio.CancelledError:
            self._phase = f"packing bucket {bucket}"
            raise
        except Exception as error:
            raise WeightSyncError(f"the sender failed at packing bucket {bucket}: {_text(error)}") from error

    async def _all(self, phase: str, calls: Sequence[tuple[ReceiverHandle, Coroutine[Any, Any, T]]]) -> list[T]:
        """Run one call per replica together; the first failure cancels the rest and names its replica."""
        self._phase = phase
        late: list[str] = []

        async def finish(receiver: ReceiverHandle, call: Coroutine[Any, Any, T]) -> T:
            try:
                return await call
            except asyncio.CancelledError:
                late.append(receiver.replica)
                raise
            except Exception as error:
                raise WeightSyncError(f"replica {receiver.replica} failed at {phase}: {_text(error)}") from error

        try:
            return await gather_or_cancel([finish(receiver, call) for receiver, call in calls])
        except asyncio.CancelledError:
            if late:
                self._phase = f"{phase}, waiting for replica {', '.join(late)}"
            raise

    @property
    def phase(self) -> str:
        """What the transaction is doing, or was doing when it failed."""
        return self._phase


class _Deadline:
    """Bounds a part of the transaction and turns every failure in it into a WeightSyncError that says where."""

    def __init__(self, sync: WeightSync, what: str) -> None:
        self._sync = sync
        self._what = what
        self._seconds = sync._config.timeout_s
        self._timeout = asyncio.timeout(self._seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise WeightSyncError(
                f"{self._what} did not end within {self._seconds:g} s; it was at: {self._sync.phase}. The generator "
                "stays paused; see the logs of the named part, or raise policy.generation.refit_cfg.timeout_s"
            ) from timeout
        if isinstance(error, Exception):
            phase = "" if isinstance(error, WeightSyncError) else f" while {self._sync.phase}"
            raise WeightSyncError(f"{self._what} failed{phase}: {_text(error)}") from error


def _check_acks(acks: list[Ack], version: PolicyVersion, num_tensors: int, checksum: str, num_replicas: int) -> None:
    """Compare every acknowledgement with what was sent; no acknowledgement is no success."""
    if not acks or len(acks) != num_replicas:
        raise WeightSyncError(f"{len(acks)} of {num_replicas} replicas acknowledged version {version}")
    for ack in acks:
        sent = (version, num_tensors, checksum)
        loaded = (ack.version, ack.num_tensors, ack.checksum)
        if loaded != sent:
            raise WeightSyncError(
                f"replica {ack.replica} acknowledged (version, tensors, checksum) = {loaded}, sent was {sent}"
            )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
