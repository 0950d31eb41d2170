"""The command line, the table and the JSON that all kernel benchmarks share."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.bench.machine import ROOT, conditions, load
from tools.bench.rounds import Case, Effort, measure

BuildCases = Callable[[argparse.Namespace], Mapping[str, Callable[[], Case]]]

RESULTS = ROOT / "tools" / "bench" / "results"
_COLUMNS = ("", "ms", "spread", "x ours", "extra MB", "difference")


def parse(
    description: str | None, name: str, arguments: Sequence[str] | None, *, seconds: float = 75.0, **sizes: int
) -> argparse.Namespace:
    """Parse the options that all benchmarks have, and the sizes that this one has, with their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size, default in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=seconds, help="no round of a table begins after these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", type=torch.device, help="cpu | cuda")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it may take a minute")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes; default: tools/bench/results")
    options = parser.parse_args(arguments)
    options.name = name
    if options.out is None:
        suffix = "" if options.device.type == "cpu" else f"_{options.device.type}"
        options.out = RESULTS / f"{name}{suffix}.json"
    return options


def run(options: argparse.Namespace, build_cases: BuildCases) -> dict[str, Any]:
    """Measure every case, print its table, write the JSON; return it."""
    torch.set_num_threads(options.threads)
    report = {
        "benchmark": options.name,
        **conditions(),
        "torch": torch.__version__,
        "device": device_name(options.device),
        "threads": options.threads,
        "arguments": {key: str(value) for key, value in vars(options).items() if key not in ("name", "out")},
        "load_before": load(),
        "tables": [],
    }
    effort = Effort(options.rounds, options.seconds)
    for build in build_cases(options).values():
        table = measure(build(), effort, options.device)
        print("\n" + format_table(table), flush=True)
        report["tables"].append(table)
    report["load_after"] = load()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def format_table(table: Mapping[str, Any]) -> str:
    """Return a table as text."""
    limits = list(table["limits_s"])
    header = [*_COLUMNS, *(f"{name} / time" for name in limits), "note"]
    lines = [header, *(_cells(row, limits, table["rounds"]) for row in table["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    title = f"{table['title']} ({table['rounds']} rounds)"
    texts = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([title, *texts])


def _cells(row: Mapping[str, Any], limits: Sequence[str], rounds: int) -> list[str]:
    name = f"limit: {row['name']}" if row["is_limit"] else row["name"]
    if row["note"]:
        return [name, *[""] * (len(_COLUMNS) - 1 + len(limits)), row["note"]]
    low, high = (f"{seconds * 1e3:.3g}" for seconds in row["spread_s"])
    difference = "" if row["is_limit"] else f"{row['difference']:.1e}"
    efficiency = ["" if row["is_limit"] else f"{row['efficiency'][name]:.0%}" for name in limits]
    ratio = f"{row['times_ours']:.2f}" if "times_ours" in row else ""
    return [
        name,
        f"{row['median_s'] * 1e3:.3g}",
        f"{low}-{high}",
        ratio,
        f"{row['extra_mb']:.0f}",
        difference,
        *efficiency,
        "" if len(row["times_s"]) == rounds else f"in {len(row['times_s'])} of the rounds",
    ]
