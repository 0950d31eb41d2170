"""From the `policy` section to micro-batches: how the sequences of a batch are cut for ranks and passes.

    batching = Batching.for_training(settings, can_share=True)
    for rank, works in enumerate(batching.cut(batch, batch.token_weights > 0, num_ranks=2)): ...

What a micro-batch may hold comes from one of three modes: so many sequences (`train_micro_batch_size`), so many
positions of padded rows (`dynamic_batching`), or one packed row (`sequence_packing`). Trees of siblings have no common
length, so in the first mode a micro-batch of trees holds the positions that its sequences could have at their longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rl.core.batch import TrainBatch
from rl.trainer.config import PolicySettings
from rl.trainer.forward_backward import Work
from rl.trainer.planner import Limit, MicroBatch, plan, row_length
from rl.trainer.siblings import Unit, find_units

# Trees are packed into rows at least this long: below it, attending to strangers in vain costs less than padding.
_SHORTEST_FULL_ROW = 256


@dataclass(frozen=True)
class Batching:
    """How batches are cut.

    Attributes:
        plain: What a micro-batch holds when every unit is one sequence.
        max_positions: What it holds of trees.
        share: Whether siblings share their prefixes.
        always: Share also where it is not estimated to save time.
    """

    plain: Limit
    max_positions: int
    share: bool
    always: bool

    @classmethod
    def for_training(cls, settings: PolicySettings, *, can_share: bool) -> "Batching":
        """Build the one for forward and backward passes."""
        return _build(
            settings, settings.dynamic_batching.train_mb_tokens, settings.sequence_packing.train_mb_tokens, can_share
        )

    @classmethod
    def for_logprobs(cls, settings: PolicySettings, *, can_share: bool) -> "Batching":
        """Build the one for passes without gradient."""
        return _build(
            settings,
            settings.dynamic_batching.logprob_mb_tokens,
            settings.sequence_packing.logprob_mb_tokens,
            can_share,
        )

    def cut(self, batch: TrainBatch, counted: Tensor, num_ranks: int) -> list[list[Work]]:
        """Return the passes of each rank. Sequences without a `counted` token ([T] bool) are in none of them."""
        units = find_units(batch, counted, share=self.share, always=self.always, max_positions=self.max_positions)
        limit = self._limit(units)
        # Nothing within a pass waits for other ranks, so ranks with little to do skip their empty micro-batches.
        return [
            [_work(batch, micro_batch, limit) for micro_batch in micro_batches if micro_batch]
            for micro_batches in plan(units, num_ranks, limit)
        ]

    def _limit(self, units: Sequence[Unit]) -> Limit:
        if all(len(unit.sequences) == 1 for unit in units) or self.plain.row_positions is not None:
            return self.plain
        longest = max(unit.num_positions for unit in units)
        row = min(max(longest, _SHORTEST_FULL_ROW), self.max_positions)
        return replace(self.plain, max_rows=None, max_positions=self.max_positions, row_positions=row)


def _build(settings: PolicySettings, padded_tokens: int | None, packed_tokens: int | None, can_share: bool) -> Batching:
    budget = settings.max_total_sequence_length * settings.train_micro_batch_size
    plain = Limit(max_rows=settings.train_micro_batch_size)
    if settings.dynamic_batching.enabled:
        budget = padded_tokens or budget
        plain = Limit(max_positions=budget, round_to=settings.dynamic_batching.sequence_length_round)
    elif settings.sequence_packing.enabled:
        budget = packed_tokens or budget
        plain = Limit(max_positions=budget, row_positions=budget)
    return Batching(
        plain=plain,
        max_positions=budget,
        share=can_share and settings.share_prefixes != "off",
        always=settings.share_prefixes == "on",
    )


def _work(batch: TrainBatch, micro_batch: MicroBatch, limit: Limit) -> Work:
    numbers = sorted(number for row in micro_batch for unit in row for number in unit.sequences)
    local = {number: index for index, number in enumerate(numbers)}
    rows = tuple(
        [Unit(tuple(local[number] for number in unit.sequences), unit.num_positions) for unit in row]
        for row in micro_batch
    )
    width = limit.width(max(row_length(row) for row in micro_batch))
    return Work(batch.select(numbers), tuple(numbers), rows, width)
