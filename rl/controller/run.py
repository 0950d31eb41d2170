"""A whole run, from a configuration to a report: run folder, resources, signals, event loop, summary.

    report = run_training(config, tree, RunOptions(resume="auto", config_name="grpo_smollm2_cpu"))

Owns what outlives the controller: the folder's lock, the reaper, the log files. It trains nothing itself.
"""

import asyncio
import logging
import os
import shutil
import uuid
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rl.controller.checkpoint import (
    Checkpoint,
    Checkpointer,
    complete_checkpoints,
    find_checkpoint,
    incomplete_checkpoints,
    resume_obstacle,
)
from rl.controller.closing import close_parts, without_masking
from rl.controller.config import MasterConfig
from rl.controller.controller import Controller
from rl.controller.dry_run import log_dir
from rl.controller.interrupts import Interrupts
from rl.controller.options import RunOptions
from rl.controller.phases import Phases
from rl.controller.report import RunReport
from rl.controller.resume import has_nothing_left
from rl.controller.run_folder import RunFolder, RunState, open_run_folder
from rl.controller.run_reporter import RunReporter
from rl.controller.setup import RunContext, build_controller
from rl.controller.stop import StopSignal
from rl.core.clock import Clock, SystemClock
from rl.core.config_tree import ConfigTree
from rl.core.config_view import to_yaml
from rl.core.errors import ConfigError, FatalError, RLError
from rl.core.fingerprint import semantic_fingerprint
from rl.core.resources import RunResources
from rl.telemetry.console import Console
from rl.telemetry.logger import RunLogger

__all__ = ["RunOptions", "RunReport", "run_training"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Session:
    """What is open during a run."""

    config: MasterConfig
    folder: RunFolder
    fingerprint: str
    resources: RunResources
    console: Console
    logger: RunLogger
    checkpointer: Checkpointer
    checkpoint: Checkpoint | None
    clock: Clock
    resumes: bool  # whether the same command goes on with this run


def run_training(config: MasterConfig, tree: ConfigTree, options: RunOptions) -> RunReport:
    """Run the training that `config` describes.

    Args:
        config: A checked configuration.
        tree: Where its values were written; stored with the run.
        options: Of the command line.

    Raises:
        ConfigError: the run could not begin.
        RLError: the run failed; the files of the run stay as they are.
    """
    notes: list[str] = []
    # Absolute, because workers may stand in another folder.
    place = log_dir(config, options.config_name).absolute()
    with ExitStack() as stack:
        folder = open_run_folder(place, options.resume, semantic_fingerprint(config), notes.append, resume_obstacle)
        stack.callback(folder.release)
        checkpoint = find_checkpoint(folder.checkpoints, folder.checkpoint)
        done = 0 if checkpoint is None else checkpoint.step
        if has_nothing_left(config, folder.path, checkpoint):
            note = f"{folder.path} is finished: it has all the {done} steps asked for; nothing was done"
            return RunReport(folder.path, done, interrupted=False, note=note)
        try:
            session = _open_session(config, tree, folder, checkpoint, stack, options)
        except OSError as error:
            raise ConfigError(f"cannot write into the run folder {folder.path}: {error}") from error
        session.console.resumed_at(done)
        for note in [*notes, f"run folder {folder.path}", *_checkpoint_notes(folder, checkpoint)]:
            session.console.note(note)
        return _run(session)


def _open_session(
    config: MasterConfig,
    tree: ConfigTree,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    stack: ExitStack,
    options: RunOptions,
) -> _Session:
    """Open what is open during a run; the stack closes it.

    Raises:
        OSError: the folder cannot be written.
    """
    clock, fingerprint = SystemClock(), semantic_fingerprint(config)
    checkpointer = Checkpointer(folder.checkpoints, config.checkpointing, to_yaml(config, tree))
    # A finished run that is extended is unfinished from here on.
    folder.write_status(RunState.UNFINISHED, fingerprint)
    (folder.path / "config.yaml").write_text(to_yaml(config, tree), encoding="utf-8")
    console = Console(config.logger.console, config.grpo.max_num_steps, folder.path / "run.log", clock)
    stack.callback(console.close)
    done = 0 if checkpoint is None else checkpoint.step
    settings = config.model_dump(mode="json")
    logger = RunLogger(config.logger, folder.path, settings, clock, resumed_after=None if folder.is_new else done)
    stack.callback(without_masking, "the loggers", logger.close)
    resources = RunResources.create()
    stack.callback(without_masking, "the run's cleaner", resources.close)
    resumes = options.resume != "never"
    return _Session(config, folder, fingerprint, resources, console, logger, checkpointer, checkpoint, clock, resumes)


def _run(session: _Session) -> RunReport:
    """Run the event loop, then say how it went, also when it failed."""
    outcome = "failed"
    try:
        with asyncio.Runner() as runner:
            report = runner.run(_train(session))
        outcome = f"interrupted after step {report.steps}" if report.interrupted else f"finished {report.steps} steps"
        if report.interrupted and session.config.checkpointing.enabled and session.resumes:
            outcome += "; the same command goes on with this run"
        return report
    except Exception:
        _log.info("the run failed", exc_info=True)
        saved = complete_checkpoints(session.folder.checkpoints)
        if saved and session.resumes:
            outcome += f"; the same command goes on from the checkpoint of step {saved[-1].step}"
        raise
    finally:
        without_masking("the loggers", session.logger.close)
        without_masking("the summary", lambda: _summarize(session, outcome))


def _summarize(session: _Session, outcome: str) -> None:
    """Show how the run went and where its files are."""
    paths = {"run folder": session.folder.path, "metrics": session.logger.path}
    export = session.folder.path / "export"
    if export.is_dir():
        paths["export"] = export
    session.console.summary(session.logger.history(), paths, outcome)


async def _train(session: _Session) -> RunReport:
    """Everything that happens on the event loop."""
    stop = StopSignal()
    console = session.console
    deadline_s = session.config.checkpointing.stop_timeout_s
    with Interrupts(stop, console.note, console.close, deadline_s) as interrupts:
        controller: Controller | None = None
        stack = AsyncExitStack()
        try:
            controller = await build_controller(session.config, _context(session, stop), stack)
            if session.checkpoint is not None:
                await controller.restore(session.checkpoint)
            interrupts.set_up_is_over()
            outcome = await controller.run()
            if outcome.finished:
                await _finish(session, controller)
            return RunReport(session.folder.path, outcome.steps, interrupted=not outcome.finished)
        except (asyncio.CancelledError, RLError) as error:
            if not stop.requested:
                raise
            if not isinstance(error, asyncio.CancelledError):
                console.note(f"stopped: {error}")
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None:
                task.uncancel()
            return RunReport(session.folder.path, 0 if controller is None else controller.step, interrupted=True)
        finally:
            await close_parts(stack)


def _context(session: _Session, stop: StopSignal) -> RunContext:
    rollouts = session.folder.path / "rollouts" if session.config.logger.log_rollouts else None
    return RunContext(
        resources=session.resources,
        checkpointer=session.checkpointer,
        reporter=RunReporter(session.console, session.logger, rollouts),
        phases=Phases(session.clock, session.console.phase),
        stop=stop,
        clock=session.clock,
    )


async def _finish(session: _Session, controller: Controller) -> None:
    """Export the final weights, then mark the run as finished: it is never resumed after that."""
    if session.config.checkpointing.export_hf:
        await _export(controller, session.folder.path / "export")
    session.folder.write_status(RunState.FINISHED, session.fingerprint)


async def _export(controller: Controller, folder: Path) -> None:
    """Write the Hugging Face folder whole or not at all."""
    temporary = folder.with_name(f"export.tmp-{uuid.uuid4().hex}")
    try:
        await controller.export(temporary)
        await asyncio.to_thread(shutil.rmtree, folder, True)
        os.rename(temporary, folder)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise FatalError(
            f"exporting the model to {folder} failed: {type(error).__name__}: {error}; the checkpoints are intact"
        ) from error


def _checkpoint_notes(folder: RunFolder, checkpoint: Checkpoint | None) -> list[str]:
    done = 0 if checkpoint is None else checkpoint.step
    broken = [each.path for each in incomplete_checkpoints(folder.checkpoints) if each.step > done]
    notes = [f"{path} is not a complete checkpoint and is left out" for path in broken]
    return notes if checkpoint is None else [*notes, f"restoring the checkpoint of step {checkpoint.step}"]
