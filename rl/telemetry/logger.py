"""RunLogger: metrics of a run to metrics.jsonl, at once, and to the configured sinks, in the background.

logger = RunLogger(config.logger, run_folder, settings, SystemClock(), resumed_after=None)
logger.log_step(1, {"train/reward": 0.25})
logger.log_step(1, {"validation/accuracy": 0.47})     # in the same line
logger.close()
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.core.clock import Clock
from rl.core.metric_registry import check_metric_names
from rl.telemetry.background import BackgroundSink
from rl.telemetry.config import LoggerConfig
from rl.telemetry.metrics_file import MetricsFile
from rl.telemetry.sinks import RunInfo, configured_sinks

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_UNWRITTEN_KEPT = 10_000


def check_logger(config: LoggerConfig) -> None:
    """Raise a ConfigError when the package of an enabled sink is not installed; imports none of them."""
    configured_sinks(config)


class RunLogger:
    """Records metrics. A failing disk or sink is a warning: only metrics.jsonl is written by the caller's thread.

    What a full disk refuses is kept and written with the next step that finds room.
    """

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
        self._unwritten: deque[tuple[int, float, Mapping[str, float]]] = deque(maxlen=_UNWRITTEN_KEPT)
        self._is_behind = False
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
            metrics: Values by full name ("train/reward", "timing/train/weight_sync"); what is not finite is left out.

        Raises:
            ValueError: the registry of metrics lacks a name.
        """
        check_metric_names(metrics)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._write(step, finite)
        for sink in self._sinks:
            sink.log(step, finite)

    def history(self) -> list[dict[str, Any]]:
        """Return all lines of metrics.jsonl, those of an earlier part of a resumed run included."""
        return self._file.read()

    def close(self) -> None:
        """Write what is left, and flush the sinks; each gets a bounded time."""
        self._write_what_waits()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def _write(self, step: int, finite: Mapping[str, float]) -> None:
        self._unwritten.append((step, self._clock.now() - self._start, finite))
        self._write_what_waits()

    def _write_what_waits(self) -> None:
        """Write in order; the first failure of a row of failures is a warning."""
        is_behind = self._is_behind
        try:
            while self._unwritten:
                self._file.write(*self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            self._is_behind = True
            if not is_behind:
                _log.warning(
                    "cannot write %s (%s); training goes on, and the lines follow when there is room",
                    self._file.path,
                    error,
                )
            return
        self._is_behind = False
        if is_behind:
            _log.info("%s can be written again and is complete", self._file.path)
