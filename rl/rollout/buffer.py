"""The replay buffer: joins the rollout pump and the train loop by tickets.

consumes: finished groups and drops (`put`), new versions (`advance`)
produces: tickets (`reserve`), the groups of a step (`take`)
waits for: `reserve` for the staleness gate and free capacity; `take` for every ticket of the step to end
unblocked by: `put` and `advance`; every wait is on an event, nothing polls

Invariants: every ticket ends exactly once, TRAINED, CANCELLED or FILTERED; live groups never exceed the capacity;
`take` never waits for a group that cannot come, because a drop re-opens its ticket (replace) or lowers its step's
target (shrink). With dynamic sampling (`refill.py`) a ticket that ends untrained gives its place to the next one
instead, and `take` stops waiting when as many groups as one step may try have ended.
One event loop owns the buffer; no method suspends between looking and changing. It starts no tasks, knows no prompts.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.core.errors import ConfigError, FatalError
from rl.core.types import Dropped, PolicyVersion, RolloutGroup
from rl.rollout.refill import Refill, RefillTally, describe_failure, valid_rewards
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
    FILTERED = "filtered"


_ALLOWED = {
    GroupState.OPEN: {GroupState.RUNNING},
    GroupState.RUNNING: {GroupState.READY, GroupState.OPEN, GroupState.CANCELLED, GroupState.FILTERED},
    GroupState.READY: {GroupState.CLAIMED, GroupState.CANCELLED},
    GroupState.CLAIMED: {GroupState.TRAINED},
    GroupState.TRAINED: set(),
    GroupState.CANCELLED: set(),
    GroupState.FILTERED: set(),
}
_ENDED = (GroupState.TRAINED, GroupState.CANCELLED, GroupState.FILTERED)


@dataclass
class _Record:
    ticket: Ticket
    state: GroupState
    group: RolloutGroup | None = None
    last_drop: Dropped | None = None
    # The valid raw rewards of the group, which outlive it.
    rewards: tuple[float, ...] = ()


class ReplayBuffer:
    """All live groups of the run.

    Args:
        sampler: The staleness policy.
        groups_per_step: Tickets of one step.
        capacity: Most live groups (open, running, ready or being trained).
        max_replacements: Fresh prompts tried for one ticket before its step shrinks.
        refill: Dynamic sampling; its sampler is an InOrderRefill then. None = every finished group is trained.

    Raises:
        ConfigError: `capacity` is below what the sampler needs.
    """

    def __init__(
        self,
        sampler: Sampler,
        groups_per_step: int,
        capacity: int,
        max_replacements: int,
        refill: Refill | None = None,
    ) -> None:
        required = sampler.required_capacity(groups_per_step)
        if capacity < required:
            raise ConfigError(
                f"async_rl.max_buffered_rollouts={capacity} is too small: {groups_per_step} groups per step that may "
                f"be {sampler.max_staleness} versions old need {required}; raise it"
            )
        self._sampler = sampler
        self._groups_per_step = groups_per_step
        self._capacity = capacity
        self._max_replacements = max_replacements
        self._refill = refill
        self._version: PolicyVersion = 0
        self._next_seq = 0
        # Tickets that gave their place to another one.
        self._released = 0
        self._last_place: int | None = None
        # With dynamic sampling: the tickets before these have been trained, or accounted for by a step.
        self._trained_end = 0
        self._taken_end = 0
        self._tally = RefillTally()
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
        self._last_place = (last_version + 1) * self._groups_per_step - 1
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
            self._finish(record, result)
        else:
            self._drop(record, result)
        self._notify()

    async def take(self, n: int) -> list[RolloutGroup]:
        """Wait until every ticket of the current step has ended, and return its groups in dispatch order.

        With dynamic sampling: the first `n` kept groups, once every ticket before the last of them has ended.

        Raises:
            FatalError: no group of the step is left, dynamic sampling cannot fill it, or a group is older than the
                sampler's bound.
        """
        await self._wait(lambda: len(self._selected(n)) >= self._target(n) or self._is_exhausted(n))
        selected = self._selected(n)
        if self._is_exhausted(n):
            raise FatalError(self._exhausted_message(n))
        if not selected:
            raise FatalError(self._empty_step_message())
        groups = []
        for ticket in selected:
            record = self._records[ticket.seq]
            assert record.group is not None
            self._check_age(record.group)
            self._move(record, GroupState.CLAIMED)
            groups.append(record.group)
        if self._refill is not None:
            self._account_up_to(selected[-1].seq)
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
        self._trained_end = self._taken_end
        self._records = {seq: record for seq, record in self._records.items() if self._is_needed(record)}
        for past in [step for step in self._cancelled if step < version]:
            del self._cancelled[past]
        self._notify()

    def untrained(self) -> list[int]:
        """The sequence numbers of the tickets whose prompts a restart tries again, in order: those that have not ended,
        and those that were filtered for a step that is not trained yet."""
        done = (GroupState.TRAINED, GroupState.CANCELLED)
        return sorted(seq for seq, record in self._records.items() if record.state not in done)

    def drain_counters(self) -> dict[str, float]:
        """Return drops by reason and replacements since the last call, and what dynamic sampling did in the steps."""
        counters: dict[str, float] = {
            "replaced_prompt_groups": self._replaced,
            "dropped_prompt_groups": sum(self._drops.values()),
        }
        counters |= {f"dropped_prompt_groups/{reason}": count for reason, count in sorted(self._drops.items())}
        if self._refill is not None:
            counters |= self._tally.metrics(self._refill.batch_size, num_carried=self.count(GroupState.READY))
        self._replaced, self._drops, self._tally = 0, Counter(), RefillTally()
        return counters

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs. Groups of steps to come are not part of it, nor those cancelled or filtered for them:
        all the tickets of those steps are issued again."""
        next_seq = self._version * self._groups_per_step + self._released
        return {"version": self._version, "next_seq": next_seq if self._refill is None else self._trained_end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved place; only before the first ticket is issued."""
        if self._records:
            raise ValueError("cannot restore a buffer with live groups")
        self._version = int(state["version"])
        self._next_seq = self._trained_end = self._taken_end = int(state["next_seq"])
        self._released = self._next_seq - self._version * self._groups_per_step
        self._notify()

    def _may_issue(self) -> bool:
        if self._first_open() is not None:
            return True
        place = self._next_seq - self._released
        if self._last_place is not None and place > self._last_place:
            return False
        if self._refill is not None and self._next_seq - self._taken_end >= self._refill.max_ahead:
            return False
        admitted = self._sampler.may_admit(place, self._version, self._groups_per_step)
        return admitted and self._live < self._capacity

    def _first_open(self) -> _Record | None:
        waiting = [record for record in self._records.values() if record.state is GroupState.OPEN]
        return min(waiting, key=lambda record: record.ticket.seq, default=None)

    def _issue(self) -> _Record:
        ticket = Ticket(self._next_seq, (self._next_seq - self._released) // self._groups_per_step)
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

    def _finish(self, record: _Record, group: RolloutGroup) -> None:
        record.rewards = valid_rewards(group)
        if self._refill is not None and not self._refill.keep(group):
            self._move(record, GroupState.FILTERED)
            self._released += 1
            return
        record.group = group
        self._move(record, GroupState.READY)
        self._evict_if_stale(record)

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
        if self._refill is not None:
            self._released += 1
        else:
            self._cancelled[record.ticket.version] += 1

    def _evict_if_stale(self, record: _Record) -> None:
        if self._sampler.is_stale(record.ticket, self._version):
            self._drops["stale"] += 1
            self._cancel(record)

    def _selected(self, n: int) -> list[Ticket]:
        records = self._records.values() if self._refill is None else self._settled(self._refill)
        ready = [record.ticket for record in records if record.state is GroupState.READY]
        return self._sampler.select(ready, self._version, n)

    def _settled(self, refill: Refill) -> list[_Record]:
        """The tickets that the current step may try, as far as they and all before them have ended, in order."""
        settled = []
        for seq in range(self._taken_end, min(self._next_seq, self._taken_end + refill.max_groups)):
            if self._records[seq].state in (GroupState.OPEN, GroupState.RUNNING):
                break
            settled.append(self._records[seq])
        return settled

    def _is_exhausted(self, n: int) -> bool:
        """Whether dynamic sampling has tried all that it may for the step, or a whole step's prompts failed."""
        if self._refill is None or len(self._selected(n)) >= n:
            return False
        settled = self._settled(self._refill)
        all_dropped = len(settled) >= n and all(record.state is GroupState.CANCELLED for record in settled)
        return all_dropped or len(settled) == self._refill.max_groups

    def _account_up_to(self, last_seq: int) -> None:
        """The step that takes the ticket `last_seq` accounts for it and all that ended before it."""
        for seq in range(self._taken_end, last_seq + 1):
            record = self._records[seq]
            self._tally.add(record.rewards, record.state is GroupState.FILTERED)
        self._taken_end = last_seq + 1

    def _is_needed(self, record: _Record) -> bool:
        """Whether the record of a ticket is needed any longer: with dynamic sampling, until its step is trained."""
        return record.state not in _ENDED or (self._refill is not None and record.ticket.seq >= self._trained_end)

    def _target(self, n: int) -> int:
        return n - self._cancelled[self._version]

    def _check_age(self, group: RolloutGroup) -> None:
        oldest = self._version - self._sampler.max_staleness
        if group.version_min < oldest:
            raise FatalError(
                f"group {group.group_id} holds tokens of version {group.version_min}, but version {self._version} may "
                f"train none older than {oldest}: a generator missed a refit"
            )

    def _exhausted_message(self, n: int) -> str:
        assert self._refill is not None
        settled = self._settled(self._refill)
        drops = [r.last_drop for r in settled if r.state is GroupState.CANCELLED and r.last_drop]
        if len(drops) == len(settled):
            return self._all_dropped_message(len(settled), drops)
        filtered = [record.rewards for record in settled if record.state is GroupState.FILTERED]
        return describe_failure(self._refill, self._version + 1, n, filtered, drops)

    def _empty_step_message(self) -> str:
        drops = [r.last_drop for r in self._records.values() if r.ticket.version == self._version and r.last_drop]
        return self._all_dropped_message(self._groups_per_step, drops)

    def _all_dropped_message(self, num_groups: int, drops: Sequence[Dropped]) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in Counter(drop.reason for drop in drops).items())
        detail = drops[-1].detail if drops else "none"
        return (
            f"step {self._version + 1} has no prompt group left: all {num_groups} were dropped, each after "
            f"{self._max_replacements} replacement prompts ({counts}); the last error was: {detail}"
        )

    async def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake every waiter once; each looks again at its own condition."""
        self._changed.set()
        self._changed = asyncio.Event()
