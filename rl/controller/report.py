"""What a run returns to the command line. Free of torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunReport:
    """How a run ended; a failure is an exception instead.

    Attributes:
        run_folder: Where its files are.
        steps: Steps done over the whole run.
        interrupted: Whether a signal ended it; the command line exits with status 130 then.
        note: What the user should be told; empty when the console has told everything.
    """

    run_folder: Path
    steps: int
    interrupted: bool
    note: str = ""
