import json
import logging
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl.core.errors import ConfigError
from rl.telemetry import sinks
from rl.telemetry.config import LoggerConfig
from rl.telemetry.logger import RunLogger, check_logger
from tests.support.clock import FakeClock
from tests.support.full_disk import files_up_to

QUIET = LoggerConfig(tensorboard_enabled=False)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_steps_and_validations_share_the_lines_of_their_steps(tmp_path):
    clock = FakeClock()
    logger = RunLogger(QUIET, tmp_path, {}, clock)
    logger.log_step(0, {"validation/accuracy": 0.5})
    clock.advance(2)
    logger.log_step(1, {"train/reward": 0.25, "train/loss": math.nan})
    logger.log_step(1, {"validation/accuracy": 0.75})
    logger.close()
    assert lines(tmp_path) == [
        {"step": 0, "time_s": 0.0, "validation/accuracy": 0.5},
        {"step": 1, "time_s": 2.0, "train/reward": 0.25, "validation/accuracy": 0.75},
    ]
    assert logger.history() == lines(tmp_path)


def test_a_resumed_run_drops_what_is_done_again_and_its_time_goes_on(tmp_path):
    clock = FakeClock()
    logger = RunLogger(QUIET, tmp_path, {}, clock)
    for step in range(1, 8):
        clock.advance(1)
        logger.log_step(step, {"train/reward": step})
    resumed = RunLogger(QUIET, tmp_path, {}, FakeClock(), resumed_after=5)
    resumed.log_step(6, {"train/reward": 60})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert lines(tmp_path)[-1] == {"step": 6, "time_s": 5.0, "train/reward": 60.0}


def test_a_metric_that_the_registry_lacks_is_an_error(tmp_path):
    logger = RunLogger(QUIET, tmp_path, {}, FakeClock())
    with pytest.raises(ValueError, match="did you mean 'train/reward'"):
        logger.log_step(1, {"train/rewards": 1.0})
    assert not logger.path.exists()


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path):
    config = LoggerConfig()
    first = RunLogger(config, tmp_path, {}, FakeClock())
    for step in range(1, 5):
        first.log_step(step, {"train/reward": float(step)})
    first.close()
    second = RunLogger(config, tmp_path, {}, FakeClock(), resumed_after=2)
    for step in range(3, 6):
        second.log_step(step, {"train/reward": 10.0 * step})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
        (5, 50.0),
    ]


def test_a_full_disk_is_one_warning_and_its_lines_follow_when_there_is_room(tmp_path, caplog):
    logger = RunLogger(QUIET, tmp_path, {}, FakeClock())
    logger.log_step(1, {"train/reward": 1.0})
    with files_up_to(logger.path.stat().st_size + 5):
        logger.log_step(2, {"train/reward": 1.0})
        logger.log_step(3, {"train/reward": 1.0})
        logger.log_step(3, {"train/loss": 2.0})
        assert [line["step"] for line in lines(tmp_path)] == [1]
    logger.log_step(4, {"train/reward": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[2] == {"step": 3, "time_s": 0.0, "train/reward": 1.0, "train/loss": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 1 and "training goes on" in messages[0]


@pytest.mark.parametrize(
    ("enabled", "module", "command"),
    [
        ("wandb_enabled", "wandb", "pip install wandb"),
        ("mlflow_enabled", "mlflow", "pip install mlflow-skinny"),
        ("tensorboard_enabled", "tensorboard", "pip install tensorboard"),
    ],
)
def test_a_missing_package_is_a_configuration_error_with_the_command(enabled, module, command, monkeypatch):
    find = sinks.importlib.util.find_spec
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    config = LoggerConfig(**{"tensorboard_enabled": False, enabled: True})
    with pytest.raises(ConfigError, match=f"logger.{enabled} is true, but '{module}' is not installed; run: {command}"):
        check_logger(config)


def test_settings_are_flattened_with_dots():
    assert sinks.flatten({"a": {"b": {"c": 1}, "d": [1]}, "e": None}) == {"a.b.c": 1, "a.d": [1], "e": None}


def test_the_last_line_is_written_at_the_end_when_there_is_room_again(tmp_path):
    logger = RunLogger(QUIET, tmp_path, {}, FakeClock())
    logger.log_step(1, {"train/reward": 1.0})
    with files_up_to(logger.path.stat().st_size + 5):
        logger.log_step(2, {"train/reward": 1.0})
    logger.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
