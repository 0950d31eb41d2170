"""What travels between a driver and the ranks of a vLLM engine in a refit, as plain values for vLLM's own verbs.

vLLM ships the payload of a verb as a mapping of strings, numbers and lists, over sockets between its processes or as
JSON over HTTP. This module says what stands in it, for both directions. It imports no vLLM, so that a driver without
one can refit a server.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.core.errors import WeightSyncError
from rl.weights.faults import FAULT_KINDS, NO_BUCKET, NO_RANK, TransferError
from rl.weights.transport import LinkSettings, PauseMode, RefitStart, TransferInfo

BACKEND = "tandem"
PAUSE_MODES: Mapping[PauseMode, str] = {"drain": "wait", "keep": "keep", "abort": "abort"}
# The message that vLLM wraps in its own words is cut out by these marks.
_OPEN, _CLOSE = "[[refit: ", " :refit]]"


def reader_rank(first_reader: int, dp_index: int, ranks_per_engine: int, rank: int) -> int:
    """Return the reader that a process of an engine is.

    Args:
        first_reader: Reader of the first process of the replica.
        dp_index: Which of its data-parallel engines.
        ranks_per_engine: Tensor times pipeline parallel processes of each.
        rank: Of the process in its engine.
    """
    if not 0 <= rank < ranks_per_engine or dp_index < 0 or first_reader < 0:
        raise WeightSyncError(
            f"no reader is rank {rank} of {ranks_per_engine} of engine {dp_index}, first reader {first_reader}"
        )
    return first_reader + dp_index * ranks_per_engine + rank


def init_values(info: TransferInfo, first_reader: int, abort_line: str) -> dict[str, Any]:
    """Return the payload of `init`.

    Args:
        info: Of the sender.
        first_reader: Reader of the first process of the replica.
        abort_line: Name that aborts come by (see `abort_line`); empty for an engine on another host.
    """
    values = asdict(info) | {"plan": base64.b64encode(info.plan).decode(), "first_reader": first_reader}
    return values | {"addresses": list(info.addresses), "readers": list(info.readers), "abort_line": abort_line}


def transfer_info(values: Mapping[str, Any]) -> TransferInfo:
    """Return the typed form of what `init_values` made.

    Raises:
        WeightSyncError: a value is missing or unknown.
    """
    fields = {name: value for name, value in values.items() if name not in ("first_reader", "abort_line")}
    try:
        typed = {
            "plan": base64.b64decode(fields["plan"]),
            "addresses": tuple(fields["addresses"]),
            "readers": tuple(fields["readers"]),
            "link": LinkSettings(**fields["link"]),
        }
        return TransferInfo(**(fields | typed))
    except (TypeError, KeyError, ValueError) as error:
        raise WeightSyncError(f"the refit's init payload is not of this version of Tandem: {error}") from error


def update_values(start: RefitStart) -> dict[str, Any]:
    """Return the payload of the one `update` of a refit."""
    return {"epoch": start.epoch, "version": start.version, "timeout_s": start.timeout_s}


@dataclass(frozen=True)
class RankReport:
    """What one process of an engine confirms."""

    reader: int
    num_tensors: int
    digests: bytes
    seconds: Mapping[str, float]

    def values(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"digests": base64.b64encode(self.digests).decode(), "seconds": dict(self.seconds)}

    @staticmethod
    def of(values: Mapping[str, Any]) -> "RankReport":
        """From plain values."""
        return RankReport(
            int(values["reader"]),
            int(values["num_tensors"]),
            base64.b64decode(values["digests"]),
            {name: float(seconds) for name, seconds in values["seconds"].items()},
        )


def fault_values(error: BaseException | None) -> dict[str, Any]:
    """Return what a process says of its last failure; empty = none."""
    if error is None:
        return {}
    text = str(error) or type(error).__name__
    if isinstance(error, TransferError):
        return {"message": text, "kind": error.kind, "rank": error.rank, "bucket": error.bucket, "is_own": False}
    return {"message": text, "kind": "aborted", "rank": NO_RANK, "bucket": NO_BUCKET, "is_own": True}


def first_fault(faults: Sequence[Mapping[str, Any]]) -> WeightSyncError | None:
    """Return the failure of an engine from what its processes say, None when none failed.

    A process that failed by itself (a tensor that its model does not take) knows the cause; the others were told.
    """
    told = [fault for fault in faults if fault]
    if not told:
        return None
    first = next((fault for fault in told if fault["is_own"]), told[0])
    if first["is_own"] or first["kind"] not in FAULT_KINDS:
        return WeightSyncError(first["message"])
    return TransferError(first["message"], first["kind"], int(first["rank"]), int(first["bucket"]))


def located(where: str, error: WeightSyncError) -> WeightSyncError:
    """Return an error with the place before its text; a TransferError keeps what it knows."""
    text = f"{where}: {error}"
    if isinstance(error, TransferError):
        return TransferError(text, error.kind, error.rank, error.bucket)
    return WeightSyncError(text)


def marked(error: BaseException) -> str:
    """Return an error's text so that `unwrapped` finds it in the words that vLLM puts around it."""
    return f"{_OPEN}{str(error) or type(error).__name__}{_CLOSE}"


def unwrapped(text: str) -> str:
    """Return the message that `marked` made, out of vLLM's words around it; other texts as they are."""
    start, end = text.find(_OPEN), text.rfind(_CLOSE)
    return text[start + len(_OPEN) : end] if 0 <= start < end else text
