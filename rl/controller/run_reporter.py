"""The reporter of a real run: metrics.jsonl and trackers, rollouts/, and the console.

A broken side channel is one warning, never the end of training.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl.controller.phases import CHECKPOINTING
from rl.controller.step import StepReport
from rl.controller.validation import ValidationReport
from rl.core.types import RolloutGroup, TrainedSequence
from rl.telemetry.console import Console
from rl.telemetry.logger import RunLogger
from rl.telemetry.rollout_log import write_rollouts

_log = logging.getLogger(__name__)


class RunReporter:
    """Passes on what the controller reports.

    Args:
        console: The terminal and run.log.
        logger: metrics.jsonl and the trackers.
        rollouts: Folder of the rollout files; None = they are switched off.
    """

    def __init__(self, console: Console, logger: RunLogger, rollouts: Path | None) -> None:
        self._console = console
        self._logger = logger
        self._rollouts = rollouts

    async def step(self, report: StepReport, extra: Mapping[str, float]) -> None:
        """Record a step; what the console shows stands on disk."""
        metrics = {**report.metrics, **extra}
        await self._write_rollouts(f"step_{report.step}.jsonl", report.groups, report.step, report.trained)
        self._logger.log_step(report.step, metrics)
        self._console.step_line(report.step, metrics)

    async def validation(self, report: ValidationReport) -> None:
        """Record a validation."""
        await self._write_rollouts(f"validation_{report.step}.jsonl", report.groups, report.step, {})
        metrics = {f"validation/{name}": value for name, value in report.metrics.items()}
        self._logger.log_step(report.step, {**metrics, "timing/validation/total": report.seconds})
        self._console.validation_line(report.step, report.metrics)

    async def saved(self, step: int, seconds: float) -> None:
        """Record in the line of the step how long its checkpoint took."""
        self._logger.log_step(step, {f"timing/train/{CHECKPOINTING}": seconds})

    def note(self, message: str) -> None:
        """Show a line."""
        self._console.note(message)

    async def _write_rollouts(
        self,
        name: str,
        groups: Sequence[RolloutGroup],
        step: int,
        trained: Mapping[str, tuple[TrainedSequence, ...]],
    ) -> None:
        if self._rollouts is None:
            return
        try:
            await asyncio.to_thread(write_rollouts, self._rollouts / name, groups, step, trained)
        except OSError as error:
            _log.warning("cannot write %s (%s); training goes on", self._rollouts / name, error)
