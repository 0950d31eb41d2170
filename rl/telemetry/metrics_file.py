"""metrics.jsonl: one JSON object per step, the record of a run that everything else is drawn from.

Every line is valid JSON (numbers that are not finite are left out), and a step has one line: values that arrive for the
step of the last line are added to it.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.core.files import replace_atomically

STEP = "step"
TIME = "time_s"


class MetricsFile:
    """Appends to metrics.jsonl of a run folder."""

    def __init__(self, path: Path) -> None:
        """Go on behind the lines that the file holds; a line torn by a crash is removed."""
        self.path = path
        lines, intact = _read(path)
        self._last: dict[str, Any] | None = lines[-1] if lines else None
        if not intact:
            self._rewrite(lines)

    @property
    def last_time_s(self) -> float:
        """Seconds of the run at the last line; 0 when there is none."""
        return 0.0 if self._last is None else float(self._last.get(TIME, 0.0))

    def write(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, or add to the last line when it is of this step."""
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if self._last is not None and self._last[STEP] == step:
            lines, _ = _read(self.path)
            line = {**self._last, TIME: round(time_s, 3), **values}
            self._rewrite([*lines[:-1], line])
            self._last = line
            return
        line = {STEP: step, TIME: round(time_s, 3), **values}
        self._append(_line(line))
        self._last = line

    def drop_steps_after(self, step: int) -> None:
        """Remove the lines of later steps, atomically; they will be done again."""
        lines = [line for line in _read(self.path)[0] if line[STEP] <= step]
        self._rewrite(lines)
        self._last = lines[-1] if lines else None

    def read(self) -> list[dict[str, Any]]:
        """Return all lines."""
        return _read(self.path)[0]

    def _append(self, text: str) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            os.truncate(self.path, size)  # a full disk leaves half a line, which would spoil the next one
            raise

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        replace_atomically(self.path, "".join(map(_line, lines)))


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the lines, and whether the last one is whole."""
    if not path.exists():
        return [], True
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    torn = bool(lines) and not lines[-1].endswith("\n")
    return [json.loads(line) for line in (lines[:-1] if torn else lines)], not torn
