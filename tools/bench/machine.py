"""What a benchmark's figures depend on beside the code: the machine, its load, the commit, the versions."""

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Return the commit that is measured, or unknown where there is no repository."""
    try:
        shown = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return shown.stdout.strip()


def machine() -> str:
    """Return the processor's name and the number of cores."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores"


def conditions() -> dict[str, Any]:
    """Return machine, commit and date for a report."""
    return {"machine": machine(), "commit": commit(), "date": datetime.now(UTC).date().isoformat()}


def load() -> float:
    """Return the number of processes that want a core, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)
