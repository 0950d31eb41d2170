import logging
import threading

import pytest

from rl.telemetry.background import BackgroundSink
from rl.telemetry.sinks import RunInfo


class Memory:
    def __init__(self):
        self.seen = []
        self.closed = False

    def log(self, step, metrics):
        self.seen.append((step, dict(metrics)))

    def close(self):
        self.closed = True


class Hanging(Memory):
    def __init__(self):
        super().__init__()
        self.release = threading.Event()

    def log(self, step, metrics):
        self.release.wait(60)


class Raising(Memory):
    def log(self, step, metrics):
        raise ConnectionError("no route")


def broken(_run):
    raise RuntimeError("cannot log in")


@pytest.fixture
def run(tmp_path):
    return RunInfo(tmp_path, {})


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_values_arrive_in_order_and_the_sink_is_closed(run, caplog):
    memory = Memory()
    sink = BackgroundSink("memory", lambda _: memory, run)
    for step in range(50):
        sink.log(step, {"a": step})
    sink.close()
    assert memory.seen == [(step, {"a": step}) for step in range(50)] and memory.closed
    assert warnings(caplog) == []


@pytest.mark.parametrize("opener", [lambda _: Raising(), broken])
def test_a_sink_that_raises_is_off_after_one_warning(opener, run, caplog):
    sink = BackgroundSink("bad", opener, run)
    for step in range(100):
        sink.log(step, {})
    sink.close()
    sink.log(1, {})
    (warning,) = warnings(caplog)
    assert "the bad logger failed and is off from now on" in warning and "training goes on" in warning


def test_a_sink_that_hangs_holds_up_nothing_and_is_told_once(run, caplog):
    hanging = Hanging()
    sink = BackgroundSink("slow", lambda _: hanging, run, queue_steps=4)
    for step in range(500):
        sink.log(step, {})
    sink.close(timeout_s=0.05)
    (warning,) = warnings(caplog)
    assert "the slow logger is 4 steps behind" in warning
    hanging.release.set()


def test_a_sink_that_hangs_at_the_end_is_left_behind(run, caplog):
    hanging = Hanging()
    sink = BackgroundSink("slow", lambda _: hanging, run)
    sink.log(1, {})
    sink.close(timeout_s=0.05)
    assert "did not finish within 0.05 s" in warnings(caplog)[0]
    hanging.release.set()
