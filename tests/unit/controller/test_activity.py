"""Tests of rl.controller.activity."""

from rl.controller.activity import Activity, overlap_s
from tests.support.clock import FakeClock


def test_overlapping_spans_make_one_interval() -> None:
    clock = FakeClock()
    activity = Activity(clock)
    with activity.span():
        clock.advance(1.0)
        with activity.span():
            clock.advance(1.0)
        clock.advance(1.0)
    clock.advance(5.0)
    with activity.span():
        clock.advance(2.0)
    assert activity.drain() == [(0.0, 3.0), (8.0, 10.0)]
    assert activity.drain() == []


def test_an_open_span_is_cut_at_the_drain_and_goes_on() -> None:
    clock = FakeClock()
    activity = Activity(clock)
    with activity.span():
        clock.advance(2.0)
        assert activity.drain() == [(0.0, 2.0)]
        clock.advance(3.0)
    assert activity.drain() == [(2.0, 5.0)]


def test_overlap_is_the_measure_of_the_intersection() -> None:
    assert overlap_s([(0, 3), (5, 9)], [(2, 6), (8, 20)]) == 3.0
    assert overlap_s([(0, 1)], [(1, 2)]) == 0.0
    assert overlap_s([], [(0, 1)]) == 0.0
