"""A plan computes every unit once, within its limits, with equal numbers of micro-batches on balanced ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.trainer.planner import Limit, plan, row_length
from rl.trainer.siblings import Unit

LIMITS = {
    "fixed": Limit(max_rows=3),
    "padded": Limit(max_positions=64),
    "padded and rounded": Limit(max_positions=64, round_to=8),
    "packed": Limit(max_positions=64, row_positions=64),
    "trees": Limit(max_positions=128, row_positions=40),
}


def units_of(lengths: list[int]) -> list[Unit]:
    return [Unit((number,), length) for number, length in enumerate(lengths)]


@pytest.mark.parametrize("mode", LIMITS)
@given(lengths=st.lists(st.integers(1, 40), max_size=30), num_ranks=st.integers(1, 4))
def test_every_unit_is_computed_once_within_the_limit(mode: str, lengths: list[int], num_ranks: int) -> None:
    limit, units = LIMITS[mode], units_of(lengths)
    ranks = plan(units, num_ranks, limit)
    seen = [unit for micro_batches in ranks for micro in micro_batches for row in micro for unit in row]
    assert sorted(seen, key=lambda unit: unit.sequences) == units
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    for micro in (micro for micro_batches in ranks for micro in micro_batches if micro):
        longest = max(row_length(row) for row in micro)
        assert limit.max_rows is None or len(micro) <= limit.max_rows
        assert limit.max_positions is None or len(micro) * limit.width(longest) <= limit.max_positions
        assert longest <= limit.width(longest)
        assert limit.row_positions is None or longest <= limit.row_positions
    loads = [sum(row_length(row) for micro in micro_batches for row in micro) for micro_batches in ranks]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert plan(units, num_ranks, limit) == ranks


def test_padded_micro_batches_hold_rows_of_similar_length() -> None:
    limit = Limit(max_positions=16, round_to=2)
    [rank] = plan(units_of([8, 2, 6, 4]), 1, limit)
    assert [[row[0].sequences[0] for row in micro] for micro in rank] == [[1, 3], [2, 0]]
    assert [limit.width(max(row_length(row) for row in micro)) for micro in rank] == [4, 8]


def test_two_ranks_share_the_tokens_evenly() -> None:
    first, second = plan(units_of([8, 2, 6, 4]), 2, Limit(max_positions=16))
    assert [[row[0].sequences[0] for row in micro] for micro in first] == [[1, 0]]
    assert [[row[0].sequences[0] for row in micro] for micro in second] == [[3, 2]]


def test_a_packed_micro_batch_is_one_row() -> None:
    [rank] = plan(units_of([4, 1, 3, 2, 1, 3, 4, 5]), 1, Limit(max_positions=8, row_positions=8))
    assert all(len(micro) == 1 for micro in rank)
    assert len(rank) == 3


def test_a_unit_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="17 positions does not fit in a micro-batch of 16"):
        plan(units_of([17]), 1, Limit(max_positions=16))


def test_rounding_never_refuses_a_row_that_fits() -> None:
    limit = Limit(max_positions=30, round_to=64)
    [[micro]] = plan(units_of([29]), 1, limit)
    assert limit.width(row_length(micro[0])) == 30
