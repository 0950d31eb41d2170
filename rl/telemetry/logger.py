"""RunLogger: metrics of a run to metrics.jsonl, at once, and to the configured sinks, in the background.

logger = RunLogger(config.logger, run_folder, settings, SystemClock(), resumed_after=None)
logger.log_step(1, {"train/reward": 0.25})
logger.log_step(1, {"validation/accuracy": 0.47})     # in the same line
logger.close()
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.core.clock import Clock
from rl.telemetry.background import BackgroundSink
from rl.telemetry.config import LoggerConfig
from rl.telemetry.metrics_file import MetricsFile
from rl.telemetry.sinks import RunInfo, configured_sinks

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


def check_logger(config: LoggerConfig) -> None:
    """Raise a ConfigError when the package of an enabled sink is not installed; imports none of them."""
    configured_sinks(config)


class RunLogger:
    """Records metrics. A failing disk or sink is a warning: only metrics.jsonl is written by the caller's thread."""

    def __init__(
        self,
        config: LoggerConfig,
        run_folder: Path,
        settings: Mapping[str, Any],
        clock: Clock,
        resumed_after: int | None = None,
    ) -> None:
        """Open the files of a run folder.

        Args:
            config: The `logger` section.
            run_folder: An existing folder.
            settings: The resolved configuration, nested; sinks record it.
            clock: Source of `time_s`, which goes on from the last line of a resumed run.
            resumed_after: The step of the checkpoint that a resumed run goes on from; later lines are dropped, since
                their steps are done again. None for a fresh run.

        Raises:
            ConfigError: the package of an enabled sink is not installed.
        """
        openers = configured_sinks(config)
        self._clock = clock
        self._file = MetricsFile(run_folder / METRICS_FILE)
        if resumed_after is not None:
            self._file.drop_steps_after(resumed_after)
        self._start = clock.now() - self._file.last_time_s
        self._disk_failed = False
        run = RunInfo(run_folder, settings, resumed_after)
        self._sinks = [BackgroundSink(name, opener, run) for name, opener in openers.items()]

    @property
    def path(self) -> Path:
        """The metrics file."""
        return self._file.path

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step.

        Args:
            step: From 1; one line per step.
            metrics: Values by full name ("train/reward", "timing/train/generation"); what is not finite is left out.
        """
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._write(step, finite)
        for sink in self._sinks:
            sink.log(step, finite)

    def history(self) -> list[dict[str, Any]]:
        """Return all lines of metrics.jsonl, those of an earlier part of a resumed run included."""
        return self._file.read()

    def close(self) -> None:
        """Flush the sinks; each gets a bounded time."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def _write(self, step: int, finite: Mapping[str, float]) -> None:
        try:
            self._file.write(step, self._clock.now() - self._start, finite)
        except OSError as error:
            if not self._disk_failed:
                self._disk_failed = True
                _log.warning("cannot write %s (%s); training goes on", self._file.path, error)
