"""One part of tools/gpu_check in a process of its own: a line of JSON for every check or table.

python3 -m tools.gpu.part parity 60 [name,name]
python3 -m tools.gpu.part transfer 90
python3 -m tools.gpu.part benches 200
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tools.bench.report import format_table
from tools.gpu.benches import all_benches, run_bench
from tools.gpu.parity import CHECKS
from tools.gpu.transfer import transfer_rows

# Of a table's time, what its first calls and compilations may take beside the rounds.
_ROUNDS_SHARE = 0.4


def parity_rows(seconds: float, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run checks until the time is up; yield a row for each, skipped ones too."""
    end = time.monotonic() + seconds
    for name in names:
        start = time.monotonic()
        if start > end:
            yield {"name": name, "skipped": True}
            continue
        try:
            result = CHECKS[name]()
        except Exception as error:  # one operator's fault must not hide the others' results
            yield {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
            continue
        worst = result.worst if math.isfinite(result.worst) else str(result.worst)
        took = round(time.monotonic() - start, 2)
        yield {"name": name, "ok": result.ok, "worst": worst, "tolerance": result.tolerance, "seconds": took}


def bench_rows(seconds: float, device: str) -> Iterator[dict[str, Any]]:
    """Measure tables until the time is up; the time that is left is shared by those that are left."""
    end = time.monotonic() + seconds
    benches = all_benches(device)
    for number, bench in enumerate(benches):
        left = end - time.monotonic()
        share = left / (len(benches) - number)
        if left < bench.least_s:
            yield {"name": bench.name, "skipped": True}
            continue
        try:
            table = run_bench(bench, _ROUNDS_SHARE * max(share, bench.least_s), device)
        except Exception as error:  # likewise
            yield {"name": bench.name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
            continue
        finally:
            torch.cuda.empty_cache()
        yield {"name": bench.name, "ok": True, "table": table, "text": format_table(table)}


def rows_of(part: str, seconds: float, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Return the rows of a part."""
    if part == "parity":
        return parity_rows(seconds, names)
    return transfer_rows() if part == "transfer" else bench_rows(seconds, "cuda")


def main(arguments: Sequence[str]) -> None:
    """Run a part."""
    part, seconds = arguments[0], float(arguments[1])
    names = arguments[2].split(",") if len(arguments) > 2 else list(CHECKS)
    for row in rows_of(part, seconds, names):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
