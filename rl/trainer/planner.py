"""One deterministic plan of a pass over a batch: which rank computes what, in which micro-batches and rows.

    plan(units, num_ranks=2, limit=Limit(max_positions=4096))

A micro-batch is a list of rows, a row a list of units (see `rl.trainer.siblings`); each is one tensor row for the
model. Every rank gets the same number of micro-batches, some of them empty when there is little to do, and tokens as
even as the units allow. Loss and gradient do not depend on the plan; time and memory do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.ops.packing import balance, first_fit_decreasing, split_bins
from rl.trainer.siblings import Unit

Row = list[Unit]
MicroBatch = list[Row]


@dataclass(frozen=True)
class Limit:
    """What one micro-batch holds.

    Attributes:
        max_rows: Most rows, or None.
        max_positions: Bound of rows x longest row, padding included; or None.
        row_positions: Units are packed into rows up to this size; None = a row for each unit.
        round_to: Rows are padded to a multiple of this.
    """

    max_rows: int | None = None
    max_positions: int | None = None
    row_positions: int | None = None
    round_to: int = 1

    def width(self, longest: int) -> int:
        """Return the padded length of rows whose longest has `longest` positions.

        Rounding ends at the budget: a row that fits without it is not refused for it.
        """
        rounded = -(-longest // self.round_to) * self.round_to
        return rounded if self.max_positions is None else max(longest, min(rounded, self.max_positions))

    def holds(self, num_rows: int, longest: int) -> bool:
        """Say whether so many rows fit."""
        fits = self.max_positions is None or num_rows * self.width(longest) <= self.max_positions
        return fits and (self.max_rows is None or num_rows <= self.max_rows)


def plan(units: Sequence[Unit], num_ranks: int, limit: Limit) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank.

    Ranks are balanced by positions (longest processing time first), rows filled by first fit decreasing, and
    micro-batches made of rows of similar length, shortest first.

    Raises:
        ValueError: a unit alone exceeds the limit.
    """
    shares = [
        [units[index] for index in sorted(share)] for share in balance([u.num_positions for u in units], num_ranks)
    ]
    ranks = [_cut(_fill_rows(share, limit), limit) for share in shares]
    count = max(len(micro_batches) for micro_batches in ranks)
    return [split_bins(micro_batches, count) for micro_batches in ranks]


def row_length(row: Row) -> int:
    """Return the positions of a row, without padding."""
    return sum(unit.num_positions for unit in row)


def _fill_rows(units: Sequence[Unit], limit: Limit) -> list[Row]:
    if limit.row_positions is None:
        return [[unit] for unit in units]
    bins = first_fit_decreasing([unit.num_positions for unit in units], limit.row_positions)
    return [[units[index] for index in sorted(bin_)] for bin_ in bins]


def _cut(rows: list[Row], limit: Limit) -> list[MicroBatch]:
    micro_batches: list[MicroBatch] = []
    for row in sorted(rows, key=row_length):
        length = row_length(row)
        if not limit.holds(1, length):
            raise ValueError(f"a row of {length} positions does not fit in a micro-batch of {limit.max_positions}")
        if micro_batches and limit.holds(len(micro_batches[-1]) + 1, length):
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return micro_batches
