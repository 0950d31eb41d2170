"""How far rollouts may run ahead of training, and which groups a step takes. No state, no I/O.

The only place that knows about staleness. A policy version v trains step v + 1.

    sampler = build_sampler(InOrderSampler(max_lookahead_versions=1))
    sampler.may_admit(dispatched=8, version=0, groups_per_step=8)   # True: the second step's groups may start
"""

from collections.abc import Sequence
from math import ceil
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
        """Whether one more group may start, after `dispatched` groups over the whole run that took a place."""
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


class InOrderRefill(InOrder):
    """For dynamic sampling: a step takes the first finished groups in dispatch order, and a group that was filtered or
    dropped takes no place.

    A group that starts at version v is preceded by fewer than groups_per_step * (v + lookahead) + started groups that
    take a place, so it is trained by version v + lookahead + ceil(started / groups_per_step) - 1 at the latest.

    Args:
        lookahead: As for InOrder.
        multiplier: Groups started for a step, as a multiple of groups_per_step.
    """

    def __init__(self, lookahead: int, multiplier: float) -> None:
        super().__init__(lookahead)
        self._multiplier = multiplier

    @property
    def max_staleness(self) -> int:
        """The lookahead, and one version for each step that the surplus of one step can fill, begun ones included."""
        return super().max_staleness + ceil(self._multiplier) - 1

    def may_admit(self, dispatched: int, version: PolicyVersion, groups_per_step: int) -> bool:
        """Whole steps for the lookahead, and what is started for the last of them."""
        return dispatched < groups_per_step * version + self.required_capacity(groups_per_step)

    def select(self, ready: Sequence[Ticket], version: PolicyVersion, n: int) -> list[Ticket]:
        """The first `n` by sequence number."""
        return sorted(ready, key=lambda ticket: ticket.seq)[:n]

    def is_stale(self, ticket: Ticket, version: PolicyVersion) -> bool:
        """Never: nothing overtakes a finished group, and its age is bounded by how early it may start."""
        return False

    def required_capacity(self, groups_per_step: int) -> int:
        """Whole steps for the lookahead, and what is started for one."""
        return (
            super().required_capacity(groups_per_step)
            - groups_per_step
            + started_groups(groups_per_step, self._multiplier)
        )


def started_groups(groups_per_step: int, multiplier: float) -> int:
    """Groups that dynamic sampling starts for a step at first."""
    return round(groups_per_step * multiplier)


def build_sampler(config: InOrderSampler, refill_multiplier: float | None = None) -> Sampler:
    """Build the policy that `async_rl.sampler` describes.

    Args:
        config: The section.
        refill_multiplier: `grpo.batch_multiplier` of a run with dynamic sampling; None = without.
    """
    if refill_multiplier is None:
        return InOrder(config.max_lookahead_versions)
    return InOrderRefill(config.max_lookahead_versions, refill_multiplier)
