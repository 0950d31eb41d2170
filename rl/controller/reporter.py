"""What the controller tells the outside; the run layer fills it with files, trackers and the console."""

from typing import Protocol

from rl.controller.step import StepReport
from rl.controller.validation import ValidationReport


class Reporter(Protocol):
    """Receives what happens. Must not raise: a broken side channel never ends a run."""

    async def step(self, report: StepReport, extra: dict[str, float]) -> None:
        """A step is done, with further metrics of it; on disk once this returns."""
        ...

    async def validation(self, report: ValidationReport) -> None:
        """A validation is done."""
        ...

    async def saved(self, step: int, seconds: float) -> None:
        """The checkpoint of a step, which has been reported before, is on disk."""
        ...

    def note(self, message: str) -> None:
        """One line for the user."""
        ...
