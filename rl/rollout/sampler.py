"""How far rollouts may run ahead of training, and which groups a step takes. No state, no I/O.

The only place that knows about staleness. A policy version v trains step v + 1.

    sampler = build_sampler(InOrderSampler(max_lookahead_versions=1))
    sampler.may_admit(dispatched=8, version=0, groups_per_step=8)   # True: the second step's groups may start
"""

from collections.abc import Sequence
from typing import Protocol

from rl.core.types import PolicyVersion
from rl.rollout.config import InOrderSampler
from rl.rollout.ticket import Ticket


class Sampler(Protocol):
    """The staleness policy of a run."""

    @property
    def max_staleness(self) -> int:
        """Versions that a trained token may lag behind the version that trains it; 0 = synchronous."""
        ...

    def may_admit(self, dispatched: int, version: PolicyVersion, groups_per_step: int) -> bool:
        """Whether one more group may start, after `dispatched` groups over the whole run."""
        ...

    def select(self, ready: Sequence[Ticket], version: PolicyVersion, n: int) -> list[Ticket]:
        """Return at most `n` of the finished groups that `version` trains, in training order."""
        ...

    def is_stale(self, ticket: Ticket, version: PolicyVersion) -> bool:
        """Whether a finished group can no longer be trained."""
        ...

    def required_capacity(self, groups_per_step: int) -> int:
        """Live groups that the buffer must be able to hold, or training would wait for groups that cannot start."""
        ...


class InOrder:
    """Groups are trained in dispatch order; group i belongs to version i // groups_per_step."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    @property
    def max_staleness(self) -> int:
        """The lookahead: a group starts at most this many versions before the one that trains it."""
        return self._lookahead

    def may_admit(self, dispatched: int, version: PolicyVersion, groups_per_step: int) -> bool:
        """dispatched // groups_per_step - version <= lookahead."""
        return dispatched // groups_per_step - version <= self._lookahead

    def select(self, ready: Sequence[Ticket], version: PolicyVersion, n: int) -> list[Ticket]:
        """The groups stamped with `version`, by sequence number."""
        return sorted((ticket for ticket in ready if ticket.version == version), key=lambda ticket: ticket.seq)[:n]

    def is_stale(self, ticket: Ticket, version: PolicyVersion) -> bool:
        """A group of an earlier version missed its step."""
        return ticket.version < version

    def required_capacity(self, groups_per_step: int) -> int:
        """One whole step for each version of the window."""
        return groups_per_step * (self._lookahead + 1)


def build_sampler(config: InOrderSampler) -> Sampler:
    """Build the policy that `async_rl.sampler` describes."""
    return InOrder(config.max_lookahead_versions)
