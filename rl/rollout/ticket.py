"""The right to bring one prompt group into one training step."""

from dataclasses import dataclass

from rl.core.types import PolicyVersion


@dataclass(frozen=True)
class Ticket:
    """Issued by the buffer in dispatch order; ends exactly once: trained, cancelled or filtered.

    Attributes:
        seq: Number of the group over the whole run, from 0; it seeds the group's sampling.
        version: The policy version that trains the group, which is also its step minus one. With dynamic sampling the
            latest that may: an earlier one does when groups before it are filtered.
        replacement: 0 for the first prompt of the ticket, then 1, 2, ... for the prompts that replace a dropped one.
    """

    seq: int
    version: PolicyVersion
    replacement: int = 0
