"""Which GPUs this host shows to the run. Asks the device files only: it imports neither torch nor a driver library."""

import os
import re
from pathlib import Path


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use: the device files, cut to CUDA_VISIBLE_DEVICES when that is set."""
    files = [path for path in devices.iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(files)
    named = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    return min(len(files), len(named))
