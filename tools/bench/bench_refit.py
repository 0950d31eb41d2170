"""A refit's transport between processes, against memcpy and against a broadcast of every tensor.

    tools/python tools/bench/bench_refit.py                        all tables; about eight minutes on two cores
    tools/python tools/bench/bench_refit.py --manifests smollm2_135m --readers 1

Tables: sizes and numbers of slots; then each manifest from one sender to one and to three receivers, over shared memory
and TCP, with and without digests. The yardsticks run in the same rounds: a copy of the same bytes by one thread
(memmove within one process), and `torch.distributed.broadcast` of one tensor after the other over gloo. Every process
has one thread. What arrived is compared with what was sent before anything is timed.

A refit is timed from the order to all processes until the last one has answered. Its parts: pack and load are the
copies of the sender and of the slowest receiver, digest is both of them together, waits are for slots (sender) and for
bytes (receiver). Extra memory is how far the process that rose most did so, from before its link is made until after
the first refit; slots in shared memory count.
"""

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.weights.transport import TensorSpec
from tools.bench.machine import conditions, load
from tools.bench.refit_ends import Fleet, LinkSpec, Run, without_digests
from tools.bench.refit_manifests import experts_1b, smollm2_135m
from tools.bench.report import RESULTS
from tools.bench.rounds import OURS, Case, Contender, Effort, measure

MANIFESTS = {"smollm2_135m": smollm2_135m, "experts_1b": experts_1b}
GLOO = "gloo, tensor by tensor"
MEMCPY = "memcpy, one thread"
# What a refit uses unless told otherwise.
DEFAULT = LinkSpec("shm", 1 << 20, 4)
SLOTS = [(256, 8), (512, 4), (512, 8), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (4096, 4), (16384, 4)]
# A slow contender takes part in every so manieth round.
_SLOW_EVERY = 3
_MEMCPY_BYTES = 1 << 28
_MEGABYTE = 1e6
_COLUMNS = ("", "ms", "spread", "GB/s", "of memcpy", "x gloo", "pack", "load", "digest", "waits", "extra MB")


@dataclass
class Transfer:
    """One contender's transfers and what the processes said of each.

    Attributes:
        fleet: Who moves the tensors.
        transfer: Moves them once.
        runs: What the processes said, by transfer.
        extra_mb: Of every process, after the first transfer; filled by `case`.
    """

    fleet: Fleet
    transfer: Callable[[], list[Run]]
    runs: list[list[Run]] = field(default_factory=list)
    extra_mb: list[float] = field(default_factory=list)

    def prepare(self) -> None:
        """Before the first transfer, whose result is looked at, make sure that there is nothing to see."""
        if not self.runs:
            self.fleet.clear()

    def run(self) -> Sequence[Tensor]:
        """Transfer; the first time return what is in all processes, as digests in numbers that floats can hold."""
        is_first = not self.runs
        self.runs.append(self.transfer())
        if not is_first:
            return ()
        return [torch.frombuffer(bytearray(digests), dtype=torch.int16) for digests in self.fleet.digests()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parse(arguments)
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "benchmark": "refit",
        **conditions(),
        "torch": torch.__version__,
        "device": "cpu",
        "threads": 1,
        "arguments": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "load_before": load(),
        "tables": [],
    }
    for table in tables(options):
        print("\n" + format_table(table), flush=True)
        report["tables"].append(table)
    report["load_after"] = load()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifests", nargs="*", choices=MANIFESTS, default=list(MANIFESTS))
    parser.add_argument("--readers", nargs="*", type=int, default=[1, 3])
    parser.add_argument("--divide", type=int, default=1, help="extents of the tensors, for a quick look")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=75.0, help="no round of a table begins after these")
    parser.add_argument("--no-slots", action="store_true", help="leave out the table of slots")
    parser.add_argument("--out", type=Path, default=RESULTS / "refit.json")
    return parser.parse_args(arguments)


def tables(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure table by table."""
    effort = Effort(options.rounds, options.seconds)
    if not options.no_slots:
        manifest = smollm2_135m(options.divide)
        yield measure_table("slots, smollm2_135m, 1 -> 1", manifest, 1, slot_links(), effort)
    for name in options.manifests:
        manifest = MANIFESTS[name](options.divide)
        for num_readers in options.readers:
            yield measure_table(f"{name}, 1 -> {num_readers}", manifest, num_readers, transport_links(), effort)


def slot_links() -> dict[str, LinkSpec]:
    """Return shared memory with slots of many sizes and numbers."""
    specs = {f"{num} x {kib} KiB": LinkSpec("shm", kib << 10, num) for kib, num in SLOTS}
    return {OURS if spec == DEFAULT else name: spec for name, spec in specs.items()}


def transport_links() -> dict[str, LinkSpec]:
    """Return both transports, with digests and without."""
    tcp = LinkSpec("tcp", DEFAULT.bucket_bytes, DEFAULT.num_slots)
    return {
        OURS: DEFAULT,
        "shm, no digests": without_digests(DEFAULT),
        "tcp": tcp,
        "tcp, no digests": without_digests(tcp),
    }


def measure_table(
    title: str, manifest: Sequence[TensorSpec], num_readers: int, links: Mapping[str, LinkSpec], effort: Effort
) -> dict[str, Any]:
    """Return a table of links between one sender and its readers, beside memcpy and gloo."""
    num_bytes = sum(bytes_of(spec) for spec in manifest)
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(manifest, num_readers))
        fleet.join_gloo()
        transfers = {GLOO: Transfer(fleet, fleet.gloo)}
        transfers[GLOO].extra_mb = _extra_mb(fleet, lambda: None, fleet.gloo)
        for name, spec in links.items():
            transfers[name] = Transfer(fleet, _refit(fleet, name))
            transfers[name].extra_mb = _extra_mb(fleet, _opener(fleet, name, spec), transfers[name].transfer)
            stack.callback(fleet.close, name)
        contenders = [
            Contender(name, each.run, each.prepare, every=_SLOW_EVERY if name == GLOO else 1)
            for name, each in transfers.items()
        ]
        copied = Contender(MEMCPY, memcpy(num_bytes), is_limit=True)
        table = measure(
            Case(title, [copied, *contenders], GLOO, {"memcpy": {MEMCPY: 1.0}}), effort, torch.device("cpu")
        )
    return complete(table, transfers, num_bytes, len(manifest))


def bytes_of(spec: TensorSpec) -> int:
    """Return the size of a tensor."""
    return torch.Size(spec.shape).numel() * torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size()


def memcpy(num_bytes: int) -> Callable[[], Sequence[Tensor]]:
    """Return a copy of so many bytes, in steps that no cache can hold."""
    size = min(num_bytes, _MEMCPY_BYTES)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def run() -> Sequence[Tensor]:
        for start in range(0, num_bytes, size):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), min(size, num_bytes - start))
        return ()

    return run


def complete(
    table: dict[str, Any], transfers: Mapping[str, Transfer], num_bytes: int, num_tensors: int
) -> dict[str, Any]:
    """Add to every row what this benchmark is about."""
    rows = {row["name"]: row for row in table["rows"]}
    copied, gloo = rows[MEMCPY]["times_s"], rows[GLOO]["times_s"]
    for name, row in rows.items():
        times = row["times_s"]
        every = _SLOW_EVERY if name == GLOO else 1
        row["gb_per_s"] = num_bytes / row["median_s"] / 1e9
        row["of_memcpy"] = statistics.median(a / b for a, b in zip(copied[::every], times, strict=True))
        row["times_gloo"] = statistics.median(
            a / b for a, b in zip(gloo, times if name == GLOO else times[::_SLOW_EVERY], strict=True)
        )
        if name in transfers:
            row["extra_mb_by_process"] = transfers[name].extra_mb
            row["extra_mb"] = max(transfers[name].extra_mb)
            row["parts_s"] = parts_of(transfers[name].runs[-len(times) :])
    return table | {"bytes": num_bytes, "tensors": num_tensors}


def parts_of(transfers: Sequence[Sequence[Run]]) -> dict[str, float]:
    """Return the medians over transfers of their parts in seconds; nothing where the parts are not known."""
    if not all(run.seconds for runs in transfers for run in runs):
        return {}

    def median(part: str, *, of_sender: bool) -> float:
        return statistics.median(
            runs[0].seconds[part] if of_sender else max(run.seconds[part] for run in runs[1:]) for runs in transfers
        )

    return {
        "pack": median("copy", of_sender=True),
        "load": median("copy", of_sender=False),
        "digest_sender": median("digest", of_sender=True),
        "digest_reader": median("digest", of_sender=False),
        "wait_sender": median("wire", of_sender=True),
        "wait_reader": median("wire", of_sender=False),
    }


def format_table(table: Mapping[str, Any]) -> str:
    """Return a table as text; times in milliseconds."""
    lines = [list(_COLUMNS), *(_cells(row) for row in table["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    size = f"{table['tensors']} tensors, {table['bytes'] / _MEGABYTE:.0f} MB, {table['rounds']} rounds"
    texts = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([f"{table['title']} ({size})", *texts])


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = (f"{seconds * 1e3:.3g}" for seconds in row["spread_s"])
    parts = {name: f"{seconds * 1e3:.3g}" for name, seconds in row.get("parts_s", {}).items()}
    pair = "{} + {}".format
    return [
        row["name"],
        f"{row['median_s'] * 1e3:.3g}",
        f"{low}-{high}",
        f"{row['gb_per_s']:.2f}",
        f"{row['of_memcpy']:.0%}",
        f"{row['times_gloo']:.1f}",
        parts.get("pack", ""),
        parts.get("load", ""),
        pair(parts["digest_sender"], parts["digest_reader"]) if parts else "",
        pair(parts["wait_sender"], parts["wait_reader"]) if parts else "",
        "" if row["is_limit"] else f"{row['extra_mb']:.0f}",
    ]


def _refit(fleet: Fleet, name: str) -> Callable[[], list[Run]]:
    return lambda: fleet.refit(name)


def _opener(fleet: Fleet, name: str, spec: LinkSpec) -> Callable[[], None]:
    return lambda: fleet.open(name, spec)


def _extra_mb(fleet: Fleet, build: Callable[[], None], transfer: Callable[[], list[Run]]) -> list[float]:
    held = fleet.mark_memory()
    build()
    transfer()
    return fleet.peaks_mb(held)


if __name__ == "__main__":
    main()
