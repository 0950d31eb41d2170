import json
import math

import pytest

from rl.telemetry.metrics_file import MetricsFile
from tests.support.full_disk import files_up_to


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_of_valid_json_without_numbers_that_are_not_finite(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, 1.5, {"train/reward": 0.25, "train/loss": math.nan, "x": math.inf})
    file.write(2, 3.0, {"train/reward": 0.5})
    assert lines(file.path) == [
        {"step": 1, "time_s": 1.5, "train/reward": 0.25},
        {"step": 2, "time_s": 3.0, "train/reward": 0.5},
    ]


def test_values_of_the_same_step_share_a_line_whoever_comes_first(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(0, 1.0, {"validation/accuracy": 0.4})
    file.write(1, 2.0, {"train/reward": 0.1})
    file.write(1, 3.0, {"validation/accuracy": 0.5})
    assert [line["step"] for line in lines(file.path)] == [0, 1]
    assert lines(file.path)[1] == {"step": 1, "time_s": 3.0, "train/reward": 0.1, "validation/accuracy": 0.5}


def test_a_resumed_file_drops_later_steps_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 8):
        first.write(step, float(step), {"a": step})
    second = MetricsFile(path)
    assert second.last_time_s == 7.0
    second.drop_steps_after(5)
    assert second.last_time_s == 5.0
    second.write(6, 6.5, {"a": 60})
    assert [(line["step"], line["a"]) for line in lines(path)] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60)]


def test_a_line_torn_by_a_crash_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 1.0}\n{"step": 2, "ti')
    file = MetricsFile(path)
    file.write(2, 2.0, {})
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_a_full_disk_leaves_no_half_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, 1.0, {"a": 1.0})
    with files_up_to(file.path.stat().st_size + 10), pytest.raises(OSError):
        file.write(2, 2.0, {"a": 2.0})
    file.write(3, 3.0, {"a": 3.0})
    assert [line["step"] for line in lines(file.path)] == [1, 3]
