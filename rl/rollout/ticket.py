"""The right to bring one prompt group into one training step."""

from dataclasses import dataclass

from rl.core.types import PolicyVersion


@dataclass(frozen=True)
class Ticket:
    """Issued by the buffer in dispatch order; ends exactly once, in a group or a drop.

    Attributes:
        seq: Number of the group over the whole run, from 0; it seeds the group's sampling.
        version: The policy version that trains the group, which is also its step minus one.
        replacement: 0 for the first prompt of the ticket, then 1, 2, ... for the prompts that replace a dropped one.
    """

    seq: int
    version: PolicyVersion
    replacement: int = 0
