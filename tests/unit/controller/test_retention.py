"""Tests of rl.controller.retention."""

import pytest

from rl.controller.retention import SavedStep, keep


def history(**metrics: float | None) -> list[SavedStep]:
    """`s10=0.5` is step 10 with metric 0.5."""
    return [SavedStep(int(name[1:]), value) for name, value in metrics.items()]


@pytest.mark.parametrize(
    ("saved", "top_k", "higher", "expected"),
    [
        (history(s10=0.5, s20=0.7, s30=0.6, s35=None), 2, True, {20, 30, 35}),
        (history(s10=0.5, s20=0.7, s30=0.6, s35=None, s40=0.7), 2, True, {20, 40}),
        (history(s10=0.5, s20=0.5, s30=0.5), 1, False, {30}),
        (history(s10=0.2, s20=0.5, s30=0.2, s40=0.9), 2, False, {30, 10, 40}),
        (history(s10=0.9, s20=None, s30=None), 2, True, {10, 30}),
        (history(s10=None, s20=None, s30=None), 2, True, {20, 30}),
        (history(s10=0.9, s20=0.1), 0, True, {20}),
        (history(s10=0.9, s15=None, s20=0.1), None, True, {10, 20}),
        ([], 3, True, set()),
    ],
)
def test_the_rule_keeps_the_latest_and_the_best_periodic_ones(
    saved: list[SavedStep], top_k: int | None, higher: bool, expected: set[int]
) -> None:
    assert keep(saved, save_period=10, keep_top_k=top_k, higher_is_better=higher) == expected
