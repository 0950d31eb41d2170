"""Make (or find) a folder with cuBLAS's headers and libraries, and print it.

CUDA toolkits are often installed without cuBLAS; its wheel has both. The wheel is the one that lock.cuda.txt pins, by
version and hash; like a Python environment it lives in the user's cache, so every checkout shares one download.

    python3.11 fetch_cublas.py --site-packages DIR     # an environment that has it already is used as it is
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON_FOLDER = HERE.parent / "python"
sys.path[:0] = [str(HERE), str(PYTHON_FOLDER)]

import fetch_wheels  # noqa: E402  # scripts beside this one and the locks, not packages
import make_env  # noqa: E402

WHEEL = "nvidia-cublas"
INSIDE = Path("nvidia") / "cu13"


def main() -> int:
    """Parse the command line, find the folder, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site-packages", type=Path, help="look here first")
    options = parser.parse_args()
    own: Path | None = options.site_packages
    try:
        if own is not None and (own / INSIDE / "include" / "cublasLt.h").exists():
            home = own
        else:
            home = fetch_wheels.fetch("cublas", fetch_wheels.pinned_requirement(PYTHON_FOLDER / "lock.cuda.txt", WHEEL))
    except (make_env.InstallError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{home / INSIDE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
