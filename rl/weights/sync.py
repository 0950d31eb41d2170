"""WeightSync: the driver-side transaction that brings a new version of the policy to every generator.

    sync = WeightSync(policy.weight_sender(), generator, settings, clock)
    await sync.connect()
    await sync.publish(version=0)          # also once before the first rollout

publish: pause -> start -> transfer (sender and all readers at once) -> finish -> digests of all ranks agree
-> whatever the caller needs before anything is generated -> resume.
Either every replica holds the new version and generates, or RefitError is raised and none does. An attempt that fails
aborts all ends; its links are not used again. The same fleet gets one more attempt, with new links and a higher epoch;
a replica that died or hangs leaves the fleet, as long as enough are left, and the rest go on. It sees no tensor.
"""

import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rl.core.clock import Clock
from rl.core.errors import WeightSyncError
from rl.core.types import PolicyVersion
from rl.weights.attempt import PATIENCE, Abortable, Patience, each, together
from rl.weights.config import RefitConfig
from rl.weights.fleet import Fleet, Member, Refittable, Server
from rl.weights.proof import Sent, check_ack, deviating_tensor
from rl.weights.report import (
    TRAINER,
    AttemptFailed,
    EndFailure,
    RefitError,
    RefitState,
    SyncReport,
    blamed_reader,
    describe,
)
from rl.weights.transport import (
    Ack,
    LinkSettings,
    OpenRequest,
    ReceiverHandle,
    RefitStart,
    SenderHandle,
    SendReport,
    TensorSpec,
    TransportName,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")
# Parts of a deadline that are not worth a word.
_SHOWN_S = 0.05
BeforeResume = Callable[[], Coroutine[Any, Any, None]]


class _Laps:
    """Seconds of the parts of an attempt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = self._clock.now()
        self.seconds[part] = now - self._last
        self._last = now

    def spent(self, timeout_s: float, phase: str) -> str:
        """What a deadline was used up by; the phase that was under way has the rest of it."""
        shown = self.seconds | {phase: max(timeout_s - sum(self.seconds.values()), 0.0)}
        parts = [f"{part} {seconds:.1f} s" for part, seconds in shown.items() if seconds >= _SHOWN_S or part == phase]
        return ", ".join(parts)


@dataclass(frozen=True)
class _Links:
    """An open set of links: who is on it, and what moves."""

    members: tuple[Member, ...]
    manifest: tuple[TensorSpec, ...]

    @property
    def readers(self) -> list[str]:
        return [name for member in self.members for name in member.reader_names]

    @property
    def handles(self) -> tuple[ReceiverHandle, ...]:
        return tuple(member.handle for member in self.members)


class WeightSync:
    """Moves weights from one sender to all replicas of a generator, all or none.

    Args:
        sender: The trainer's end.
        generator: Paused during a refit and resumed only after success.
        config: Transport, deadline, pause mode, what is enough.
        run_tag: Prefix of the transport's address, so that leftovers of the run can be found.
        clock: Measures the refit.
        servers: Engines beside the generator's.
        link: What both ends of a link are told; None = as the settings have it where all ends are on one host.
    """

    def __init__(
        self,
        sender: SenderHandle,
        generator: Refittable,
        config: RefitConfig,
        run_tag: str,
        clock: Clock,
        servers: Sequence[Server] = (),
        link: LinkSettings | None = None,
    ) -> None:
        self._sender = sender
        self._fleet = Fleet(generator, servers, config.min_replicas)
        self._config = config
        self._transport: TransportName = config.transport_for(on_gpus=False, num_hosts=1)
        self._link = config.link_for(num_hosts=1) if link is None else link
        self._run_tag = run_tag
        self._clock = clock
        self.patience: Patience = PATIENCE
        self._links: _Links | None = None
        self._laps = _Laps(clock)  # of the attempt under way
        self._connected = False
        self._busy = False
        self._is_paused = False
        # Above those of every earlier driver: an engine may outlive it, and refuses what is not new.
        self._epoch = time.time_ns() // 1000
        self._state: RefitState = "CLEAN"
        self._sent: Sent | None = None

    @property
    def state(self) -> RefitState:
        """DIRTY from the first byte of a refit until one has completed."""
        return self._state

    @property
    def version(self) -> PolicyVersion | None:
        """The version that every replica holds; None before the first refit."""
        return None if self._sent is None else self._sent.version

    @property
    def servers(self) -> list[Server]:
        """Servers that are left."""
        return self._fleet.servers

    async def connect(self) -> None:
        """Open the links to every replica; once.

        Raises:
            WeightSyncError: no replica, plans or tensors that differ, no memory for the links, or the deadline passed.
        """
        self._laps = _Laps(self._clock)
        try:
            self._links = await self._open(self._clock.now() + self._config.timeout_s)
        except AttemptFailed as failure:
            names = [name for member in self._fleet.members() for name in member.reader_names]
            end, detail = self._describe(failure, names)
            raise WeightSyncError(f"the refit cannot be set up: {end} failed at {failure.phase}: {detail}") from failure
        self._connected = True
        _log.info(
            "refits go over %s: up to %d buckets of at most %g MiB under way",
            self._transport,
            self._config.num_buffers_for(self._transport),
            self._config.bucket_bytes_for(self._transport) / (1 << 20),
        )

    async def publish(self, version: PolicyVersion, before_resume: BeforeResume | None = None) -> SyncReport:
        """Bring `version` to every replica.

        Args:
            version: Above the last one.
            before_resume: Done when all hold the version, within the deadline and before anything is generated; again
                in an attempt that follows one that failed after it.

        Raises:
            RefitError: anything failed, was late or did not agree, twice; names the first bad end. The generator stays
                paused (unless pausing or resuming it failed), and the same call may be made again.
            WeightSyncError: the version was published already, or a call came at the wrong time.
        """
        self._check_call(version)
        self._busy = True
        self._is_paused = False  # whatever others did meanwhile
        started, attempts = self._clock.now(), 0
        try:
            while True:
                attempts += 1
                try:
                    return await self._attempt(version, before_resume, attempts, started)
                except AttemptFailed as failure:
                    await self._go_on(version, failure, attempts)
        finally:
            self._busy = False

    async def explain(self, precision: str) -> str | None:
        """Compare how trainer and engines compute with each tensor.

        Args:
            precision: Torch dtype name of the arithmetic.

        Returns:
            The first tensor with which they do not agree, its layer and the replica; None where all agree.
        """
        expected = await self._sender.signatures()
        for member in self._fleet.members():
            text = deviating_tensor(expected, await member.handle.signatures(), precision)
            if text is not None:
                return f"{member.name} computes with another tensor than the trainer: {text}"
        return None

    async def close(self) -> None:
        """Release the links; idempotent."""
        self._links = None
        self._connected = False
        await self._sender.close()

    def _check_call(self, version: PolicyVersion) -> None:
        if not self._connected:
            raise WeightSyncError(f"refit of version {version} before connect()")
        if self._busy:
            raise WeightSyncError(f"refit of version {version} while another one is under way")
        if self._sent is not None and version <= self._sent.version:
            raise WeightSyncError(
                f"refit of version {version} refused: the generators hold version {self._sent.version} already, and "
                "versions only grow"
            )

    async def _attempt(
        self, version: PolicyVersion, before_resume: BeforeResume | None, number: int, started: float
    ) -> SyncReport:
        """One try; the links are given back only when all went well."""
        laps = self._laps = _Laps(self._clock)
        deadline = self._clock.now() + self._config.timeout_s
        links, self._links = self._links, None
        if not self._is_paused:
            # First of all: whatever fails from here on, nothing is generated until a refit succeeds.
            await self._each("pause", self._fleet.pauses(self._config.pause_mode), deadline)
            self._is_paused = True
        laps.end("pause")
        if links is None or links.readers != [n for m in self._fleet.members() for n in m.reader_names]:
            links = await self._open(deadline)
        laps.end("open")
        self._epoch += 1
        start = RefitStart(self._epoch, version, self._left(deadline))
        await self._together("start", links.handles, [handle.start(start) for handle in links.handles], deadline)
        self._state = "DIRTY"
        updates = [handle.update() for handle in links.handles]
        results = await self._together("transfer", links.handles, updates, deadline, self._sender.send(start))
        laps.end("transfer")
        commits = [handle.finish(version) for handle in links.handles]
        acks = await self._together("commit", links.handles, commits, deadline)
        sent = self._agree(links, version, results[TRAINER], acks)
        if before_resume is not None:
            await self._alone("wake", before_resume(), deadline)
        self._is_paused = False
        await self._each("resume", self._fleet.resumes(), deadline)
        laps.end("commit")
        changed = sent.num_changed(self._sent)
        self._links, self._sent, self._state = links, sent, "CLEAN"
        return self._report(results[TRAINER], acks, laps, number, started, changed)

    async def _open(self, deadline: float) -> _Links:
        """Make links between the trainer and everybody who is left."""
        members = tuple(self._fleet.members())
        if not members:
            raise WeightSyncError("the generator has no replica; a refit would update nothing")
        manifest = await self._alone("manifest", self._sender.manifest(), deadline, TRAINER)
        if not manifest:
            raise WeightSyncError("the trainer offers no tensor to send; nothing would be updated")
        links = _Links(members, manifest)
        request = OpenRequest(
            transport=self._transport,
            channel=f"{self._run_tag}-refit-{uuid.uuid4().hex[:8]}",
            bucket_bytes=self._config.bucket_bytes_for(self._transport),
            num_slots=self._config.num_buffers_for(self._transport),
            readers=tuple(links.readers),
            timeout_s=self._left(deadline),
            link=self._link,
        )
        info = await self._alone("open", self._sender.open(request), deadline, TRAINER)
        inits = [member.handle.init(info, member.first_reader) for member in members]
        await self._together("connect", links.handles, inits, deadline, self._sender.join())
        return links

    async def _go_on(self, version: PolicyVersion, failure: AttemptFailed, attempts: int) -> None:
        """Decide whether another attempt makes sense: once for the same fleet, and for every smaller one.

        Raises:
            RefitError: it does not.
        """
        members = self._fleet.members()
        readers = [name for member in members for name in member.reader_names]
        end, detail = self._describe(failure, readers)
        trainer_is_gone = any(one.end == TRAINER and one.is_gone for one in failure.failures)
        suspects = [one.end for one in failure.failures if one.is_gone]
        blamed = blamed_reader(failure)
        if attempts > 1 and blamed is not None and blamed < len(readers):
            # It could not be reached twice, whatever it says itself: a partition, or a network that drops it.
            suspects.append(readers[blamed].rpartition(".")[0])
        if attempts > 1 and failure.phase == "pause" and len(failure.failures) < len(members):
            # The others have finished what they had, twice: it hangs, though its process may still take an abort.
            suspects += [one.end for one in failure.failures]
        smaller = [await self._fleet.give_up(name, detail) for name in dict.fromkeys(suspects)]
        if trainer_is_gone or not (attempts == 1 or any(smaller)):
            raise RefitError(version, failure.phase, self._state, end, detail, attempts) from failure
        _log.warning(
            "refit of version %d failed at %s: %s: %s; trying again with new links", version, failure.phase, end, detail
        )

    def _describe(self, failure: AttemptFailed, readers: Sequence[str]) -> tuple[str, str]:
        """The first bad end and what is reported; of a deadline also which setting it is, and what used it up."""
        end, detail = describe(failure, readers)
        if failure.is_late:
            timeout_s = self._config.timeout_s
            spent = self._laps.spent(timeout_s, failure.phase)
            detail += f"; policy.generation.refit_cfg.timeout_s={timeout_s:g} was spent on {spent}"
        return end, detail

    def _agree(self, links: _Links, version: PolicyVersion, report: SendReport, acks: Mapping[str, Ack | None]) -> Sent:
        """Compare every confirmation with what was sent; no confirmation is no success."""
        end = TRAINER
        try:
            sent = Sent.of(version, links.manifest, report.digests)
            for member in links.members:
                end = member.name
                check_ack(acks[end], end, member.handle.num_readers, sent, self._sent)
        except WeightSyncError as error:
            raise AttemptFailed("commit", [EndFailure(end, error)]) from error
        return sent

    def _report(
        self,
        report: SendReport,
        acks: Mapping[str, Ack],
        laps: _Laps,
        number: int,
        started: float,
        changed: int,
    ) -> SyncReport:
        assert self._sent is not None
        parts = dict(laps.seconds)
        for seconds in (report.seconds, *(ack.seconds for ack in acks.values())):
            for part, value in seconds.items():
                parts[part] = max(parts.get(part, 0.0), value)
        return SyncReport(
            version=self._sent.version,
            seconds=self._clock.now() - started,
            bytes=report.num_bytes,
            tensors=len(self._sent.manifest),
            replicas=len(acks),
            changed=changed,
            attempts=number,
            parts=parts,
        )

    async def _together(
        self,
        phase: str,
        handles: Sequence[ReceiverHandle],
        calls: Sequence[Coroutine[Any, Any, Any]],
        deadline: float,
        sending: Coroutine[Any, Any, Any] | None = None,
    ) -> dict[str, Any]:
        """One call on every receiver, and one on the sender where there is one; the first failure aborts all."""
        by_end = {handle.replica: call for handle, call in zip(handles, calls, strict=True)}
        if sending is not None:
            by_end = {TRAINER: sending, **by_end}
        ends: dict[str, Abortable] = {TRAINER: self._sender, **{handle.replica: handle for handle in handles}}
        return await together(phase, ends, by_end, self._left(deadline), self.patience)

    async def _each(self, phase: str, calls: Mapping[str, Coroutine[Any, Any, Any]], deadline: float) -> None:
        """One call per member that has nothing to do with the others."""
        ends = {member.name: member.handle for member in self._fleet.members()}
        await each(phase, ends, calls, self._left(deadline), self.patience)

    async def _alone(self, phase: str, call: Coroutine[Any, Any, T], deadline: float, end: str = "the generator") -> T:
        """A call that has no counterpart."""
        results = await together(phase, {TRAINER: self._sender}, {end: call}, self._left(deadline), self.patience)
        result: T = results[end]
        return result

    def _left(self, deadline: float) -> float:
        return max(deadline - self._clock.now(), 0.0)
