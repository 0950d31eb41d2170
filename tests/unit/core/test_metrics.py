"""Metric sums are divided once, by global counts; extrema keep their kind; timers add up."""

import pytest

from rl.core.metrics import Metric, Per, Timers, finalize_metrics, merge_metrics


class _StepClock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


def test_a_token_mean_over_unequal_microbatches_is_the_mean_over_all_tokens() -> None:
    parts = [{"x": Metric(100 * 2.0, Per.TOKENS)}, {"x": Metric(900 * 0.5, Per.TOKENS)}]
    assert finalize_metrics(merge_metrics(parts), 1000, 2) == {"x": pytest.approx(0.65)}


def test_each_kind_has_its_denominator() -> None:
    sums = {"t": Metric(6, Per.TOKENS), "s": Metric(6, Per.SEQUENCES), "n": Metric(6, Per.NONE)}
    assert finalize_metrics(sums, num_tokens=3, num_sequences=2) == {"t": 2.0, "s": 3.0, "n": 6.0}


def test_extrema_combine_and_untouched_sentinels_are_left_out() -> None:
    merged = merge_metrics([{"lo": Metric(2, Per.MIN), "hi": Metric(2, Per.MAX)}, {"lo": Metric(1, Per.MIN)}])
    assert finalize_metrics(merged, 1, 1) == {"lo": 1.0, "hi": 2.0}
    assert finalize_metrics({"lo": Metric(float("inf"), Per.MIN)}, 1, 1) == {}


def test_without_a_valid_token_token_metrics_are_absent_not_nan() -> None:
    assert finalize_metrics({"x": Metric(0.0, Per.TOKENS), "n": Metric(0.0, Per.NONE)}, 0, 0) == {"n": 0.0}


def test_one_name_of_two_kinds_is_an_error() -> None:
    with pytest.raises(ValueError, match="per tokens and per sequences"):
        merge_metrics([{"x": Metric(1, Per.TOKENS)}, {"x": Metric(1, Per.SEQUENCES)}])


def test_a_phase_entered_twice_adds_up_and_drain_starts_over() -> None:
    clock = _StepClock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.span("train"):
            clock.time += seconds
    assert timers.drain() == {"train": 3.5}
    assert timers.drain() == {}
