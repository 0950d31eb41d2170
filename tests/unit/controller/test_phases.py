"""Tests of rl.controller.phases."""

from rl.controller.phases import IDLE, TOTAL, TRAINING, WEIGHT_SYNC, Phases
from tests.support.clock import FakeClock


def test_phases_are_timed_counted_and_told() -> None:
    clock, heard = FakeClock(), list[str]()
    phases = Phases(clock, heard.append)
    with phases.total():
        with phases.span(TRAINING):
            assert phases.current == TRAINING
            clock.advance(2.0)
        assert phases.current == IDLE
        with phases.span(WEIGHT_SYNC):
            clock.advance(1.0)
    assert heard == [TRAINING, WEIGHT_SYNC]
    assert phases.changes == 4
    assert phases.drain() == {TRAINING: 2.0, WEIGHT_SYNC: 1.0, TOTAL: 3.0}
    assert phases.drain() == {}
