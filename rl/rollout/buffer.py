"""The replay buffer: joins the rollout pump and the train loop by tickets.

consumes: finished groups and drops (`put`), new versions (`advance`)
produces: tickets (`reserve`), the groups of a step (`take`)
waits for: `reserve` for the staleness gate and free capacity; `take` for every ticket of the step to end
unblocked by: `put` and `advance`; every wait is on an event, nothing polls

Invariants: every ticket ends exactly once, TRAINED or CANCELLED; live groups never exceed the capacity; `take` never
waits for a group that cannot come, because a drop re-opens its ticket (replace) or lowers its step's target (shrink).
One event loop owns the buffer; no method suspends between looking and changing. It starts no tasks, knows no prompts.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl.core.errors import ConfigError, FatalError
from rl.core.types import Dropped, PolicyVersion, RolloutGroup
from rl.rollout.sampler import Sampler
from rl.rollout.ticket import Ticket


class GroupState(enum.Enum):
    """Where a ticket stands."""

    OPEN = "open"
    RUNNING = "running"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    CANCELLED = "cancelled"


_ALLOWED = {
    GroupState.OPEN: {GroupState.RUNNING},
    GroupState.RUNNING: {GroupState.READY, GroupState.OPEN, GroupState.CANCELLED},
    GroupState.READY: {GroupState.CLAIMED, GroupState.CANCELLED},
    GroupState.CLAIMED: {GroupState.TRAINED},
    GroupState.TRAINED: set(),
    GroupState.CANCELLED: set(),
}
_ENDED = (GroupState.TRAINED, GroupState.CANCELLED)


@dataclass
class _Record:
    ticket: Ticket
    state: GroupState
    group: RolloutGroup | None = None
    last_drop: Dropped | None = None


class ReplayBuffer:
    """All live groups of the run.

    Args:
        sampler: The staleness policy.
        groups_per_step: Tickets of one step.
        capacity: Most live groups (open, running, ready or being trained).
        max_replacements: Fresh prompts tried for one ticket before its step shrinks.

    Raises:
        ConfigError: `capacity` is below what the sampler needs.
    """

    def __init__(self, sampler: Sampler, groups_per_step: int, capacity: int, max_replacements: int) -> None:
        required = sampler.required_capacity(groups_per_step)
        if capacity < required:
            raise ConfigError(
                f"async_rl.max_buffered_rollouts={capacity} is too small: {groups_per_step} groups per step with a "
                f"lookahead of {sampler.max_staleness} versions need {required}; raise it"
            )
        self._sampler = sampler
        self._groups_per_step = groups_per_step
        self._capacity = capacity
        self._max_replacements = max_replacements
        self._version: PolicyVersion = 0
        self._next_seq = 0
        self._last_seq: int | None = None
        self._records: dict[int, _Record] = {}
        self._live = 0
        self._cancelled: Counter[PolicyVersion] = Counter()
        self._drops: Counter[str] = Counter()
        self._replaced = 0
        self._changed = asyncio.Event()

    @property
    def version(self) -> PolicyVersion:
        """The version of the step that is to be trained next."""
        return self._version

    @property
    def live(self) -> int:
        """Groups that hold a place in the buffer."""
        return self._live

    def count(self, state: GroupState) -> int:
        """Groups in `state` now."""
        return sum(record.state is state for record in self._records.values())

    def limit_steps(self, last_version: PolicyVersion) -> None:
        """Issue no ticket for a version above `last_version`: the run ends there."""
        self._last_seq = (last_version + 1) * self._groups_per_step - 1
        self._notify()

    async def reserve(self) -> Ticket:
        """Return the next ticket; re-opened ones first. Waits for the staleness gate and for capacity."""
        await self._wait(self._may_issue)
        record = self._first_open() or self._issue()
        self._move(record, GroupState.RUNNING)
        return record.ticket

    async def put(self, ticket: Ticket, result: RolloutGroup | Dropped) -> None:
        """End the attempt of `ticket`.

        Raises:
            ValueError: the ticket is not running: it was never issued, or it has ended already.
        """
        record = self._records.get(ticket.seq)
        if record is None or record.ticket != ticket or record.state is not GroupState.RUNNING:
            state = "unknown" if record is None else record.state.value
            raise ValueError(f"{ticket} is {state}, not running: a ticket ends exactly once")
        if isinstance(result, RolloutGroup):
            record.group = result
            self._move(record, GroupState.READY)
            self._evict_if_stale(record)
        else:
            self._drop(record, result)
        self._notify()

    async def take(self, n: int) -> list[RolloutGroup]:
        """Wait until every ticket of the current step has ended, and return its groups in dispatch order.

        Raises:
            FatalError: no group of the step is left, or a group is older than the sampler's bound.
        """
        await self._wait(lambda: len(self._selected(n)) >= self._target(n))
        selected = self._selected(n)
        if not selected:
            raise FatalError(self._empty_step_message())
        groups = []
        for ticket in selected:
            record = self._records[ticket.seq]
            assert record.group is not None
            self._check_age(record.group)
            self._move(record, GroupState.CLAIMED)
            groups.append(record.group)
        return groups

    async def advance(self, version: PolicyVersion) -> None:
        """The engines hold `version`: close the trained step and open the gate for new groups.

        Raises:
            ValueError: the version does not grow.
        """
        if version <= self._version:
            raise ValueError(f"the version must grow: {self._version} -> {version}")
        self._version = version
        for record in list(self._records.values()):
            if record.state is GroupState.CLAIMED:
                self._move(record, GroupState.TRAINED)
            elif record.state is GroupState.READY:
                self._evict_if_stale(record)
        self._records = {seq: record for seq, record in self._records.items() if record.state not in _ENDED}
        for past in [step for step in self._cancelled if step < version]:
            del self._cancelled[past]
        self._notify()

    def untrained(self) -> list[int]:
        """The sequence numbers of the tickets that have not ended, in order."""
        return sorted(seq for seq, record in self._records.items() if record.state not in _ENDED)

    def drain_counters(self) -> dict[str, int]:
        """Return drops by reason and replacements since the last call."""
        counters = {"replaced_prompt_groups": self._replaced, "dropped_prompt_groups": sum(self._drops.values())}
        counters |= {f"dropped_prompt_groups/{reason}": count for reason, count in sorted(self._drops.items())}
        self._replaced, self._drops = 0, Counter()
        return counters

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs. Groups of steps to come are not part of it, cancelled ones neither: all the tickets of
        those steps are issued again."""
        return {"version": self._version, "next_seq": self._version * self._groups_per_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved place; only before the first ticket is issued."""
        if self._records:
            raise ValueError("cannot restore a buffer with live groups")
        self._version = int(state["version"])
        self._next_seq = int(state["next_seq"])
        self._notify()

    def _may_issue(self) -> bool:
        if self._first_open() is not None:
            return True
        if self._last_seq is not None and self._next_seq > self._last_seq:
            return False
        admitted = self._sampler.may_admit(self._next_seq, self._version, self._groups_per_step)
        return admitted and self._live < self._capacity

    def _first_open(self) -> _Record | None:
        waiting = [record for record in self._records.values() if record.state is GroupState.OPEN]
        return min(waiting, key=lambda record: record.ticket.seq, default=None)

    def _issue(self) -> _Record:
        ticket = Ticket(self._next_seq, self._next_seq // self._groups_per_step)
        record = _Record(ticket, GroupState.OPEN)
        self._records[ticket.seq] = record
        self._next_seq += 1
        self._live += 1
        return record

    def _move(self, record: _Record, state: GroupState) -> None:
        """The only place that changes a state, and with it the number of live groups."""
        if state not in _ALLOWED[record.state]:
            raise ValueError(f"{record.ticket}: {record.state.value} -> {state.value} is not a transition")
        record.state = state
        if state in _ENDED:
            self._live -= 1
            record.group = None

    def _drop(self, record: _Record, drop: Dropped) -> None:
        record.last_drop = drop
        self._drops[drop.reason] += 1
        if record.ticket.replacement < self._max_replacements:
            self._replaced += 1
            self._move(record, GroupState.OPEN)
            record.ticket = Ticket(record.ticket.seq, record.ticket.version, record.ticket.replacement + 1)
            return
        self._cancel(record)

    def _cancel(self, record: _Record) -> None:
        self._move(record, GroupState.CANCELLED)
        self._cancelled[record.ticket.version] += 1

    def _evict_if_stale(self, record: _Record) -> None:
        if self._sampler.is_stale(record.ticket, self._version):
            self._drops["stale"] += 1
            self._cancel(record)

    def _selected(self, n: int) -> list[Ticket]:
        ready = [record.ticket for record in self._records.values() if record.state is GroupState.READY]
        return self._sampler.select(ready, self._version, n)

    def _target(self, n: int) -> int:
        return n - self._cancelled[self._version]

    def _check_age(self, group: RolloutGroup) -> None:
        oldest = self._version - self._sampler.max_staleness
        if group.version_min < oldest:
            raise FatalError(
                f"group {group.group_id} holds tokens of version {group.version_min}, but version {self._version} may "
                f"train none older than {oldest}: a generator missed a refit"
            )

    def _empty_step_message(self) -> str:
        drops = [r.last_drop for r in self._records.values() if r.ticket.version == self._version and r.last_drop]
        counts = ", ".join(f"{count} {reason}" for reason, count in Counter(drop.reason for drop in drops).items())
        detail = drops[-1].detail if drops else "none"
        return (
            f"step {self._version + 1} has no prompt group left: all {self._groups_per_step} were dropped, each after "
            f"{self._max_replacements} replacement prompts ({counts}); the last error was: {detail}"
        )

    async def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake every waiter once; each looks again at its own condition."""
        self._changed.set()
        self._changed = asyncio.Event()
