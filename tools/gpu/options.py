"""The command line of tools/gpu_check. It needs nothing but Python, so that --help works where torch is missing."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tools.bench.machine import ROOT


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile-only", action="store_true", help="stop before anything runs on a GPU")
    parser.add_argument("--arch", default=None, help="to compile for, such as 90; default: that of the GPU")
    parser.add_argument("--cublas", type=Path, default=None, help="a folder with include/cublasLt.h and lib/")
    parser.add_argument("--build-dir", type=Path, default=Path("/tmp/tandem_native"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=345.0, help="for everything; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "bench" / "results" / "gpu.json")
    return parser.parse_args(arguments)
