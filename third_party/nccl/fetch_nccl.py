"""Make (or find) a folder with NCCL's header and library, and print it.

The wheel is the one that lock.cuda.txt pins, by version and hash; it lives in the user's cache like cuBLAS's
(//third_party/cuda:fetch_cublas.py), and as there an environment that has it already is used as it is.

    python3.11 fetch_nccl.py --site-packages DIR
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON_FOLDER = HERE.parent / "python"
sys.path[:0] = [str(HERE.parent / "cuda"), str(PYTHON_FOLDER)]

import fetch_wheels  # noqa: E402  # scripts beside the locks, not packages
import make_env  # noqa: E402

WHEEL = "nvidia-nccl-cu13"
INSIDE = Path("nvidia") / "nccl"


def main() -> int:
    """Parse the command line, find the folder, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site-packages", type=Path, help="look here first")
    options = parser.parse_args()
    own: Path | None = options.site_packages
    try:
        if own is not None and (own / INSIDE / "include" / "nccl.h").exists():
            home = own
        else:
            requirement = fetch_wheels.pinned_requirement(PYTHON_FOLDER / "lock.cuda.txt", WHEEL)
            home = fetch_wheels.fetch("nccl", requirement)
    except (make_env.InstallError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{home / INSIDE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
