"""The phases of a refit of one vLLM engine, through vLLM's own verbs: init, start, one update, finish.

And its sleep before one. vLLM's own `sleep` and `wake_up` would also pause and resume its scheduler, the latter with
the last part that wakes, when other engines may still fail; so its workers are asked to move memory, and nothing else.

Coroutines for the engine's event loop, one at a time; only `abort` may come beside one, from any thread. What the
engine's processes say of a failure becomes a typed error here; a dead engine is an InfraError.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rl.core.errors import InfraError, WeightSyncError
from rl.core.types import PolicyVersion
from rl.generation.asleep import Asleep
from rl.generation.generator import WAKE_TAGS, WakeTag
from rl.generation.vllm.abort_line import new_name, send_abort
from rl.generation.vllm.shares import signatures_of
from rl.generation.vllm.wire import PAUSE_MODES, RankReport, first_fault, init_values, located, unwrapped, update_values
from rl.weights.transport import Ack, RefitStart, TransferInfo

T = TypeVar("T")
# vLLM lets a call of an engine that dies wait for ever, and tells of the death by a flag alone.
_LIFE_CHECK_S = 0.25


class EngineRefit:
    """One engine's end.

    Args:
        engine: AsyncLLM.
        replica: For messages.
        num_readers: Processes that receive.
        clears_caches: Whether `finish` forgets cached prefixes.
    """

    def __init__(self, engine: Any, replica: str, num_readers: int, clears_caches: bool) -> None:
        self._engine = engine
        self._replica = replica
        self._num_readers = num_readers
        self._clears_caches = clears_caches
        self._asleep = Asleep(replica)
        self._abort_line = new_name()
        self._first_reader = 0
        self._start: RefitStart | None = None

    async def init(self, info: TransferInfo, first_reader: int) -> None:
        """Join the links in every process of the engine.

        Raises:
            WeightSyncError: plan or tensors differ, or not every end shows up in time.
            InfraError: the engine is dead.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._first_reader = first_reader
        self._start = None
        async with self._phase("init"):
            await self._engine.collective_rpc("tandem_end_session")
            values = init_values(info, first_reader, self._abort_line)
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=values))
            await self._check()

    async def start(self, start: RefitStart) -> None:
        """Open the layers; a refit that was given up before is forgotten.

        Raises:
            WeightSyncError: the engine is not paused, or its weights are asleep.
        """
        async with self._phase("start"):
            self._asleep.check_awake(("weights",), f"take version {start.version}")
            if not await self._engine.is_paused():
                raise WeightSyncError(f"it is not paused; weights of version {start.version} cannot be loaded")
            await self._engine.collective_rpc("tandem_end_session")
            await self._engine.start_weight_update()
            await self._check()
            self._start = start

    async def update(self) -> None:
        """Receive and load all buckets, in every process.

        Raises:
            WeightSyncError: no refit was started, or it failed.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        start, self._start = self._start, None
        async with self._phase("update"):
            if start is None:
                raise WeightSyncError("update without start")
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=update_values(start)))
            await self._check()

    async def finish(self, version: PolicyVersion) -> Ack:
        """Close the layers, set the engine's version, forget cached prefixes; return what every process loaded.

        Raises:
            WeightSyncError: a process holds something else.
        """
        async with self._phase("finish"):
            await self._engine.finish_weight_update()
            await self._check()
            await self._engine.update_weight_version(str(version))
            received = await self._engine.collective_rpc("tandem_received")
            if self._clears_caches:
                await self._engine.reset_prefix_cache()
            reported = await self._engine.get_weight_version()
            return ack_of(self._replica, reported, [RankReport.of(values) for values in received])

    async def sleep(self) -> int:
        """Finish requests, stay paused, give up weights and caches; return the bytes that left all devices."""
        async with self._phase("sleep"):
            await self._engine.pause_generation(mode=PAUSE_MODES["drain"], clear_cache=True)
            self._asleep.fall_asleep()
            freed: list[int] = await self._engine.collective_rpc("tandem_sleep")
            return sum(freed)

    async def wake(self, tags: Sequence[WakeTag]) -> int:
        """Take memory again for what the tags name; return the bytes that entered all devices."""
        async with self._phase("wake"):
            asleep = self._asleep.among(tags)
            if not asleep:
                return 0
            taken: list[int] = await self._engine.collective_rpc("tandem_wake", args=(asleep,))
            self._asleep.woken(asleep)
            return sum(taken)

    def check_awake(self) -> None:
        """Refuse to generate while something is asleep.

        Raises:
            WeightSyncError: something is.
        """
        self._asleep.check_awake(WAKE_TAGS, "generate")

    def abort(self, reason: str) -> None:
        """Let every process give up its transfer; nothing happens where none is, or the engine is gone."""
        for rank in range(self._num_readers):
            send_abort(self._abort_line, self._first_reader + rank, reason)

    async def while_alive(self, phase: str, work: Coroutine[Any, Any, T]) -> T:
        """Await one phase, but not longer than the engine lives.

        Raises:
            InfraError: the engine died meanwhile.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LIFE_CHECK_S))[0]:
                if self._engine.errored:
                    raise InfraError(f"{self._replica} failed at {phase}: the engine died")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def release(self) -> None:
        """Forget the engine, which is about to end."""
        self._engine = None

    async def signatures(self) -> dict[str, tuple[float, ...]]:
        """Return the signature of every tensor as the layers compute with it.

        Raises:
            WeightSyncError: no refit told the engine which tensors there are.
        """
        async with self._phase("signatures"):
            return signatures_of(await self._engine.collective_rpc("tandem_products"))

    @asynccontextmanager
    async def _phase(self, phase: str) -> AsyncIterator[None]:
        """Turn what vLLM raises into what its processes mean."""
        where = f"{self._replica} failed at {phase}"
        try:
            yield
        except WeightSyncError as error:
            raise located(where, error) from error
        except Exception as error:
            raise await self._explained(where, error) from error

    async def _check(self) -> None:
        """Ask every process whether the verb before failed there: engines of several cannot raise, see `receiver`."""
        fault = first_fault(await self._engine.collective_rpc("tandem_fault"))
        if fault is not None:
            raise fault

    async def _explained(self, where: str, error: Exception) -> Exception:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            return InfraError(f"{where}: the engine is dead ({error})")
        try:
            faults = await self._engine.collective_rpc("tandem_fault")
        except Exception as silence:
            return InfraError(f"{where}: {unwrapped(str(error))}; after that: {silence}")
        return located(where, first_fault(faults) or WeightSyncError(unwrapped(str(error))))


def ack_of(replica: str, reported: str, reports: list[RankReport]) -> Ack:
    """Return the acknowledgement of a replica from what its processes confirm.

    Raises:
        WeightSyncError: none did, they loaded different numbers of tensors, or the engine reports no version.
    """
    counts = sorted({report.num_tensors for report in reports})
    if len(counts) != 1:
        raise WeightSyncError(f"the processes of {replica} loaded {counts} tensors")
    try:
        version = int(reported)
    except ValueError as error:
        raise WeightSyncError(f"{replica} reports version '{reported}' after the refit") from error
    ordered = sorted(reports, key=lambda report: report.reader)
    names = {name for report in ordered for name in report.seconds}
    slowest = {name: max(report.seconds.get(name, 0.0) for report in ordered) for name in sorted(names)}
    return Ack(replica, version, counts[0], tuple(report.digests for report in ordered), slowest)
