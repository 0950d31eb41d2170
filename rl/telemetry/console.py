"""Console: what a user sees of a run, and run.log, which holds every line of it and more.

On a terminal: one progress line at the bottom (step, phase, tokens/s, time left) and one line per step above it.
Elsewhere: the same lines, plain. Warnings of our modules are shown when they are logged; the rest goes to run.log.

    console = Console(config.logger.console, total_steps=20, run_log_path=folder / "run.log", clock=SystemClock())
    console.phase("policy_training")
    console.step_line(1, metrics)
    console.summary(history, {"metrics": path}, "finished")
    console.close()
"""

import io
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, TextIO

import rich.console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from rl.core.clock import Clock
from rl.telemetry.curve import draw_curve
from rl.telemetry.step_text import duration, phase_label, step_text, validation_text

_log = logging.getLogger(__name__)

_OURS = logging.getLogger("rl")
_ROOT = logging.getLogger()
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_PLAIN_WIDTH = 200
_STEPS_FOR_ETA = 5
_FIRST_PHASE = "exposed_generation"


class Console:
    """The one writer to the terminal during a run."""

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain"],
        total_steps: int,
        run_log_path: Path,
        clock: Clock,
        stream: TextIO | None = None,
        unit: str = "step",
    ) -> None:
        """Open run.log (appending, for a resumed run) and start the display.

        Args:
            mode: rich, plain, or auto = rich when the stream is a terminal.
            total_steps: Steps of the whole run.
            run_log_path: The log file; its folder exists.
            clock: Time, for the time left.
            stream: Where to write; None = standard output. A closed one takes nothing, and that is no error.
            unit: What is counted.
        """
        out = _open_or_nowhere(sys.stdout if stream is None else stream)
        self._is_ascii = not _can_write(out, "⣿┤")
        self._is_rich = mode == "rich" or (mode == "auto" and out.isatty())
        self._total_steps = total_steps
        self._clock = clock
        # Nothing that comes before the first step is part of its time.
        self._step_began: float | None = None
        self._durations: deque[float] = deque(maxlen=_STEPS_FOR_ETA)
        self._terminal = (
            _Terminal(file=out, force_terminal=True, highlight=False)
            if self._is_rich
            else _Terminal(file=out, force_terminal=False, no_color=True, width=_PLAIN_WIDTH, highlight=False)
        )
        self._output_lost = False
        self._handlers = self._attach(run_log_path)
        self._progress = self._make_progress(unit)
        self._task = self._progress.add_task("", total=total_steps, step=0, phase="starting", rate="", eta="")
        if self._is_rich:
            self._progress.start()

    def phase(self, name: str) -> None:
        """Show what the run does now; a terminal shows it in the progress line."""
        if self._step_began is None and name == _FIRST_PHASE:
            self._step_began = self._clock.now()
        self._progress.update(self._task, phase=phase_label(name))

    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the line of a finished step and move the progress on."""
        now = self._clock.now()
        if self._step_began is not None:
            self._durations.append(now - self._step_began)
        self._step_began = now
        left = median(self._durations or [0.0]) * (self._total_steps - step)
        rate = metrics.get("performance/tokens_per_sec")
        text = step_text(step, self._total_steps, metrics)
        if not self._is_rich and step < self._total_steps:
            text.append(f"  eta {duration(left)}")
        self._show(text)
        self._progress.update(
            self._task,
            completed=step,
            step=step,
            eta=f"{duration(left)} left" if step < self._total_steps else "",
            rate="" if rate is None else f"{rate:.0f} tok/s",
        )

    def counted(self, done: int, total: int) -> None:
        """Set the progress of work that is not made of steps; a terminal shows it in the progress line."""
        self._progress.update(self._task, completed=done, total=total, step=done)

    def resumed_at(self, step: int) -> None:
        """Set the progress of a resumed run, which has `step` steps behind it."""
        self._progress.update(self._task, completed=step, step=step)

    def validation_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the line of a validation; its time does not count into the time left."""
        self._show(validation_text(step, metrics))
        if self._step_began is not None:
            self._step_began = self._clock.now()

    def note(self, text: str) -> None:
        """Show a line that the user should see, for example where the run folder is."""
        self._show(Text(text))

    def summary(self, history: Sequence[Mapping[str, Any]], paths: Mapping[str, Path], outcome: str) -> None:
        """Show how the run went.

        Args:
            history: The lines of metrics.jsonl.
            paths: What the user may want to open, by name.
            outcome: One word or sentence: "finished", "interrupted at step 7".
        """
        self._stop_progress()
        rewards = [(float(line["step"]), float(line["train/reward"])) for line in history if "train/reward" in line]
        if rewards:
            self._show(Text(""))
            self._show(Text("  reward by step", style="bold"))
            for row in draw_curve(rewards, is_ascii=self._is_ascii):
                self._show(Text(row, style="green"))
        self._show(Text(""))
        for name, value in [*_key_figures(history, rewards), *((name, str(path)) for name, path in paths.items())]:
            self._show(Text.assemble(("  ", ""), (f"{name:<12}", "dim"), value))
        steps = sum("train/num_invalid_rollouts" in line for line in history)
        if steps and not rewards:
            warning = f"warning: none of the {steps} steps had a valid reward, so nothing was learned; see run.log"
            self._show(Text(warning, style="bold yellow"))
        self._show(Text(outcome, style="bold"))

    def close(self) -> None:
        """End the display and the log file; idempotent."""
        self._stop_progress()
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        if self._handlers:
            logging.captureWarnings(False)
        self._handlers = []

    def _make_progress(self, unit: str) -> Progress:
        return Progress(
            SpinnerColumn("line" if self._is_ascii else "dots", style="cyan", finished_text="*"),
            TextColumn(f"[bold]{unit} {{task.fields[step]}}/{{task.total:.0f}}"),
            BarColumn(bar_width=24, style="bright_black", complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[phase]}"),
            TextColumn("[dim]{task.fields[rate]}"),
            TextColumn("[dim]{task.fields[eta]}"),
            console=self._terminal,
            transient=True,
            refresh_per_second=8,
            disable=not self._is_rich,
        )

    def _stop_progress(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def _attach(self, run_log_path: Path) -> list[tuple[logging.Logger, logging.Handler]]:
        """Send our log from INFO on, and warnings of other libraries, to run.log; our warnings also to the terminal."""
        file = logging.FileHandler(run_log_path, mode="a", encoding="utf-8", delay=False)
        file.setFormatter(logging.Formatter(_FORMAT))
        _OURS.setLevel(logging.INFO)
        shown = _WarningsToTerminal(self)
        logging.captureWarnings(True)
        _ROOT.addHandler(file)
        _OURS.addHandler(shown)
        return [(_ROOT, file), (_OURS, shown)]

    def _show(self, text: Text) -> None:
        if text.plain.strip():
            _log.info("%s", text.plain)
        self.print_only(text)

    def print_only(self, text: Text) -> None:
        """Write to the terminal, not to run.log. A closed terminal (a broken pipe) does not end training."""
        if self._output_lost:
            return
        try:
            self._terminal.print(text, soft_wrap=not self._is_rich)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed meanwhile
            self._output_lost = True
            _log.info("standard output is gone (%s); the run goes on, see metrics.jsonl", error)


def _open_or_nowhere(stream: TextIO | None) -> TextIO:
    """Return a stream that can be written to in any encoding; what goes to a closed one is dropped."""
    if stream is None or stream.closed:
        return open(os.devnull, "w", encoding="utf-8")  # as long-lived as standard output
    if isinstance(stream, io.TextIOWrapper):
        # A reward or a path in another alphabet is no reason to end a run.
        stream.reconfigure(errors="replace")
    return stream


def _can_write(stream: TextIO, characters: str) -> bool:
    """Whether the stream's encoding has the characters."""
    try:
        characters.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Terminal(rich.console.Console):
    """A terminal whose end does not end the run."""

    def on_broken_pipe(self) -> None:
        """Go silent when the reader of standard output is gone (`| head`), where rich would leave the program."""
        self.quiet = True
        if self.file is sys.stdout:
            # Python's own flush at exit would fail on the old pipe and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _log.info("standard output is gone; the run goes on, see metrics.jsonl")


class _WarningsToTerminal(logging.Handler):
    """Shows warnings and errors of our modules above the progress line."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        word, style = ("error", "bold red") if record.levelno >= logging.ERROR else ("warning", "yellow")
        self._console.print_only(Text.assemble((f"{word}: ", style), record.getMessage()))


def _key_figures(history: Sequence[Mapping[str, Any]], rewards: Sequence[tuple[float, float]]) -> list[tuple[str, str]]:
    figures = []
    if len(rewards) >= 2:
        half = len(rewards) // 2  # a short run has fewer steps in both, and none in both at once
        first, last = rewards[: min(2, half)], rewards[-min(5, half) :]
        means = [sum(reward for _, reward in part) / len(part) for part in (first, last)]
        steps = "step" if len(first) == 1 else "steps"
        figures.append(("reward", f"{means[0]:.3f} (first {len(first)} {steps}) to {means[1]:.3f} (last {len(last)})"))
    accuracy = [float(line["validation/accuracy"]) for line in history if "validation/accuracy" in line]
    if accuracy:
        figures.append(
            ("validation", f"{accuracy[0]:.3f} to {accuracy[-1]:.3f}" if len(accuracy) > 1 else f"{accuracy[0]:.3f}")
        )
    if history:
        figures.append(("time", duration(float(history[-1]["time_s"]))))
    return figures
