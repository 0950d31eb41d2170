"""Write a kernel file with one bug of planted_bugs.toml in it. Fails where the bug's text is not there exactly once.

python3 plant.py --table planted_bugs.toml --bug missing_barrier --source row_stats_cuda.cu > buggy.cu
"""

import argparse
import sys
import tomllib
from pathlib import Path


def plant(source: str, find: str, replace: str) -> str:
    """Return the source with the one occurrence of `find` replaced."""
    count = source.count(find)
    if count != 1:
        raise SystemExit(f"the text occurs {count} times, not once; follow the kernel's change here:\n{find}")
    return source.replace(find, replace)


def main() -> None:
    """Write to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--bug", required=True)
    parser.add_argument("--source", type=Path, required=True)
    options = parser.parse_args()
    bugs = {bug["name"]: bug for bug in tomllib.loads(options.table.read_text(encoding="utf-8"))["bug"]}
    bug = bugs[options.bug]
    # Messages name the kernel file, on lines that a longer or shorter replacement moves.
    sys.stdout.write(f'#line 1 "{bug["file"]}"\n')
    sys.stdout.write(plant(options.source.read_text(encoding="utf-8"), bug["find"], bug["replace"]))


if __name__ == "__main__":
    main()
