"""The single controller: one event loop that owns the pump, the watchdog and the train loop.

| task     | consumes             | produces          | waits for                   | unblocked by          |
|----------|----------------------|-------------------|-----------------------------|-----------------------|
| pump     | tickets, prompts     | groups            | staleness gate, capacity    | advance, put          |
| train    | groups of a step     | versions, metrics | groups, models, refit       | put                   |
| watchdog | progress             | StallError        | its clock                   | -                     |

A failure of any task ends the run with that task's own error. It builds nothing (`setup.py`) and handles no signals
(`run.py`).
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.algorithms.config import GRPOConfig
from rl.controller.checkpoint import Checkpoint, Checkpointer, JsonPart, Saveable, checkpoint_metrics
from rl.controller.checkpoint_config import CheckpointingConfig
from rl.controller.phases import CHECKPOINTING, GENERATION, TRAINING, VALIDATION, Phases
from rl.controller.pump import RolloutPump
from rl.controller.refit_check import RefitCheck
from rl.controller.reporter import Reporter
from rl.controller.step import StepReport, TrainStep
from rl.controller.step_metrics import prefixed
from rl.controller.stop import RunStopped, StopSignal
from rl.controller.validation import Validator
from rl.controller.watchdog import Progress, Watchdog
from rl.core.clock import Clock
from rl.core.errors import ConfigError, FatalError, RLError
from rl.data.prompts import PromptSource
from rl.rollout.buffer import GroupState, ReplayBuffer
from rl.rollout.config import StallWatchdogConfig
from rl.rollout.manager import RolloutManager
from rl.rollout.movement import Movement
from rl.trainer.policy import Policy

LAST_SAVE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ControllerParts:
    """What a controller drives.

    Attributes:
        policy: The trained model, as checkpointed.
        refit_check: Of the last refit; the next step waits for it.
        prompts: The training prompts, whose position is checkpointed.
        buffer: Joins pump and step.
        manager: Makes the groups.
        movement: What the managers of training and validation have under way.
        pump: Dispatches them.
        step: One training step, and the first publication.
        validator: None = no validation prompts.
        checkpointer: Saves and restores.
        phases: What the train loop is doing.
        stop: The request to stop.
        reporter: The outside.
        call_timeout_s: Deadline of one worker call, which bounds every phase but generation.
        max_unscored_steps: Consecutive steps without one valid reward that end the run.
    """

    policy: Policy
    refit_check: RefitCheck
    prompts: PromptSource
    buffer: ReplayBuffer
    manager: RolloutManager
    movement: Movement
    pump: RolloutPump
    step: TrainStep
    validator: Validator | None
    checkpointer: Checkpointer
    phases: Phases
    stop: StopSignal
    reporter: Reporter
    call_timeout_s: float
    max_unscored_steps: int


@dataclass
class RunProgress:
    """How far the run is."""

    step: int = 0
    consumed_prompts: int = 0
    total_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """How the loop ended."""

    steps: int
    finished: bool


class Controller:
    """Runs the steps of a run that `setup.build_controller` has put together."""

    def __init__(
        self,
        parts: ControllerParts,
        grpo: GRPOConfig,
        checkpointing: CheckpointingConfig,
        watchdog: StallWatchdogConfig,
        clock: Clock,
    ) -> None:
        self._parts = parts
        self._grpo = grpo
        self._checkpointing = checkpointing
        self._watchdog = Watchdog(watchdog, self._progress, clock)
        self._state = RunProgress()
        self._saved_step = 0
        self._unscored_steps = 0

    @property
    def step(self) -> int:
        """Steps done."""
        return self._state.step

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`; before `run`.

        Raises:
            FatalError: it lacks a part.
            ConfigError: it belongs to other data.
        """
        info = await self._parts.checkpointer.restore(checkpoint, self._saveables())
        if self._parts.policy.version != self._state.step or self._parts.buffer.version != self._state.step:
            raise FatalError(
                f"checkpoint {checkpoint.path} disagrees with itself: step {info['step']}, policy version "
                f"{self._parts.policy.version}, buffer version {self._parts.buffer.version}"
            )
        self._saved_step = checkpoint.step

    async def run(self) -> Outcome:
        """Train until the last step, a failure, or a stop request.

        Raises:
            RLError: the first cause of the failure of any task.
        """
        parts = self._parts
        parts.buffer.limit_steps(self._grpo.max_num_steps - 1)
        await parts.step.publish(parts.policy.version)
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(parts.pump.run(), name="rollout pump"),
                    tasks.create_task(self._watchdog.run(), name="watchdog"),
                ]
                await self._train()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        finally:
            await parts.refit_check.close()
        return Outcome(self._state.step, self._state.step >= self._grpo.max_num_steps)

    async def export(self, folder: Path) -> None:
        """Write the trained weights in Hugging Face format into `folder`."""
        await self._parts.policy.export(folder)

    async def _train(self) -> None:
        """Every remaining step; a stop request ends it between steps, or where waiting is safe to abandon."""
        parts, last = self._parts, self._grpo.max_num_steps
        try:
            if self._state.step == 0 and self._grpo.val_at_start:
                async with parts.pump.held():
                    await self._validate(0)
            # What came before the first step is no part of its time.
            parts.phases.drain()
            while self._state.step < last and not parts.stop.requested:
                report = await parts.step(self._state.step + 1)
                await self._after_step(report, last)
        except RunStopped:
            parts.reporter.note(f"stopping after step {self._state.step}")
        except asyncio.CancelledError:
            if parts.stop.requested:
                await self._save_what_is_done()
            raise
        if not parts.stop.requested:
            await parts.refit_check.end()
        if self._checkpointing.enabled and self._saved_step < self._state.step < last:
            parts.reporter.note(f"saving step {self._state.step}")
            await self._save({})

    async def _after_step(self, report: StepReport, last: int) -> None:
        """Log, then validate, then save: what a checkpoint says was done stands in the log."""
        parts = self._parts
        # Nothing may be awaited before the hold: a new version has just opened the gate.
        async with parts.pump.held():
            self._state.step = report.step
            self._state.consumed_prompts += len(report.groups)
            self._state.total_tokens += int(report.metrics["train/total_num_tokens"])
            await parts.reporter.step(report, prefixed("train", self._counters()))
            self._check_rewards(report)
            period = self._grpo.val_period
            is_due = (period > 0 and report.step % period == 0) or (report.step == last and self._grpo.val_at_end)
            validation = await self._validate(report.step) if is_due else {}
        if not self._checkpointing.enabled:
            return
        train = {name.removeprefix("train/"): value for name, value in report.metrics.items()}
        # Picked after every step, so that a misspelt name ends the run after the first and not at the first save.
        metrics = checkpoint_metrics(self._checkpointing.metric_name, train, validation)
        if parts.checkpointer.is_due(report.step, last):
            await self._save(metrics)

    def _check_rewards(self, report: StepReport) -> None:
        """End a run whose scorer is broken: it would go on for days and learn nothing."""
        if any(rollout.is_valid for group in report.groups for rollout in group.rollouts):
            self._unscored_steps = 0
            return
        self._unscored_steps += 1
        limit = self._parts.max_unscored_steps
        if self._unscored_steps >= limit:
            raise FatalError(
                f"no rollout of the last {limit} steps has a valid reward (see the warnings above and run.log for "
                "why), so nothing is learned; mend the environment, then start the same command again (or raise "
                "async_rl.rollout_failure.max_unscored_steps)"
            )

    async def _validate(self, step: int) -> dict[str, float]:
        parts = self._parts
        if parts.validator is None:
            return {}
        with parts.phases.span(VALIDATION):
            report = await parts.stop.guard(parts.validator.run(step))
        await parts.reporter.validation(report)
        return report.metrics

    async def _save(self, metrics: Mapping[str, float]) -> None:
        parts = self._parts
        with parts.phases.span(CHECKPOINTING):
            await parts.checkpointer.save(self._state.step, self._saveables(), asdict(self._state), metrics)
        self._saved_step = self._state.step
        # Drained here, or the next step would report it as its own.
        await parts.reporter.saved(self._saved_step, parts.phases.drain()[CHECKPOINTING])

    async def _save_what_is_done(self) -> None:
        """After a stop that had to abandon a phase: save where the parts agree on a step, else say what is lost."""
        parts, step, phase = self._parts, self._state.step, self._parts.phases.last
        parts.reporter.note(f"{phase} after step {step} did not end in time; it is abandoned")
        if not self._checkpointing.enabled or self._saved_step == step:
            return
        agree = parts.policy.version == parts.buffer.version == step
        # A model that is abandoned while it trains may have changed or not; a save that hung would hang again.
        reason = f"the model may have changed during {phase}"
        if agree and phase not in (TRAINING, CHECKPOINTING):
            try:
                async with asyncio.timeout(LAST_SAVE_TIMEOUT_S):
                    await self._save({})
                return
            except (TimeoutError, RLError) as error:
                reason = f"saving failed: {error or type(error).__name__}"
        parts.reporter.note(
            f"steps {self._saved_step + 1} to {step} are in no checkpoint and will be done again: {reason}"
        )

    def _saveables(self) -> dict[str, Saveable]:
        parts = self._parts
        return {
            "policy": PolicyPart(parts.policy, self._checkpointing.save_optimizer),
            "prompts": JsonPart(parts.pump.state_dict, parts.pump.load_state_dict),
            "buffer": JsonPart(parts.buffer.state_dict, parts.buffer.load_state_dict),
            "counters": JsonPart(lambda: asdict(self._state), self._load_counters),
        }

    def _load_counters(self, state: Mapping[str, Any]) -> None:
        self._state = RunProgress(**state)

    def _counters(self) -> dict[str, float]:
        """What went wrong since the last step, and how far the run is."""
        parts = self._parts
        counters = {**parts.manager.drain_counters(), **parts.buffer.drain_counters()}
        counters["num_skipped_prompts"] = parts.prompts.skipped.overlong
        counters["num_faulty_prompts"] = parts.prompts.skipped.faulty
        counters["consumed_prompts"] = self._state.consumed_prompts
        return {name: float(value) for name, value in counters.items()}

    def _progress(self) -> Progress:
        """What the watchdog looks at: attempts while the trainer waits for groups, else the train loop alone."""
        parts = self._parts
        phase, count = parts.phases.current, parts.buffer.count
        filtered = f", {count(GroupState.FILTERED)} filtered" if self._grpo.use_dynamic_sampling else ""
        awaited = (
            f"{phase} in step {self._state.step + 1} ({parts.movement.inflight} groups in flight, "
            f"{count(GroupState.READY)} ready, {count(GroupState.OPEN)} to be replaced{filtered})"
        )
        moves = (parts.phases.changes, parts.movement.attempts)
        if phase in (GENERATION, VALIDATION):
            return Progress(moves, awaited, None)
        return Progress(moves[:1], awaited, parts.call_timeout_s)


class PolicyPart:
    """The trained model as a part of a checkpoint."""

    def __init__(self, policy: Policy, with_optimizer: bool) -> None:
        self._policy = policy
        self._with_optimizer = with_optimizer

    async def save(self, folder: Path) -> None:
        """Weights, and optimizer, scheduler and RNG unless switched off."""
        folder.mkdir(parents=True, exist_ok=True)
        await self._policy.save(folder, with_optimizer=self._with_optimizer)

    async def restore(self, folder: Path) -> None:
        """Read them back.

        Raises:
            FatalError: the files are damaged.
        """
        try:
            await self._policy.restore(folder)
        except ConfigError as error:
            # The loader takes the folder for the user's choice, but here it is ours.
            raise FatalError(str(error)) from error


def root_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of tasks: the first fatal one, else the first of all."""
    leaves = list(_leaves(failures))
    return next((error for error in leaves if isinstance(error, FatalError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
