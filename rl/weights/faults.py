"""How a transfer ends badly: one error type with the kind, who gave up, and the bucket that was under way.

It names faults; what happens after one (abort the others, retry, drop a replica) is the transaction's business.
"""

from typing import Final, Literal, get_args

from rl.core.errors import WeightSyncError

FaultKind = Literal["deadline", "peer lost", "aborted", "mismatch", "data loss", "unavailable", "invalid", "device"]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
# Ranks below it are roots (senders), the others FIRST_READER + reader.
FIRST_READER: Final = 1 << 16
NO_RANK: Final = -1
NO_BUCKET: Final = -1


class TransferError(WeightSyncError):
    """A transfer failed.

    Attributes:
        kind: What happened.
        rank: Who gave up first: a root, FIRST_READER + a reader, or NO_RANK.
        bucket: The bucket that was under way, or NO_BUCKET.
    """

    def __init__(self, message: str, kind: FaultKind = "aborted", rank: int = NO_RANK, bucket: int = NO_BUCKET) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind
        self.rank = rank
        self.bucket = bucket

    @property
    def root(self) -> int | None:
        """The root that gave up, where it was one."""
        return self.rank if 0 <= self.rank < FIRST_READER else None

    @property
    def reader(self) -> int | None:
        """The reader that gave up, where it was one."""
        return self.rank - FIRST_READER if self.rank >= FIRST_READER else None

    def __reduce__(self) -> tuple[type["TransferError"], tuple[str, FaultKind, int, int]]:
        """Survive pickling with all that it knows."""
        return type(self), (str(self), self.kind, self.rank, self.bucket)
