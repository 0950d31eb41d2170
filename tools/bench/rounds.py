"""Measure contenders against each other: interleaved rounds, extra memory, agreement of their values.

    case = Case("float32, forward", [ours, eager, read_limit], reference="torch eager", limits={"DRAM": {"read": 1.0}})
    rows = measure(case, Effort(rounds=10, seconds=60.0), torch.device("cpu"))

A round runs every contender once, and each round begins with another one, so that a machine that drifts hits all
alike. Ratios are medians over rounds of the ratio within a round.
"""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OURS = "ours"
_MEGABYTE = 1e6
# GPU calls return before they end; this many seconds of them are timed together.
_GPU_SAMPLE_S = 2e-3


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to compute the same.

    Attributes:
        name: As in the table.
        run: Does it, and returns the tensors that must agree with the reference's; none for a limit.
        prepare: Restores what a run destroys; not timed.
        is_optional: Whether a failure at the first call leaves it out, with a note.
        is_limit: Whether it is a bound on the machine and no contender.
        every: Takes part in every so manieth round only, the first among them: for the slow.
    """

    name: str
    run: Callable[[], Sequence[Tensor]]
    prepare: Callable[[], None] = _nothing
    is_optional: bool = False
    is_limit: bool = False
    every: int = 1


@dataclass(frozen=True)
class Case:
    """A table.

    Attributes:
        title: What is computed.
        contenders: Who computes it, limits included.
        reference: Whose values the others are compared with.
        limits: For each limit of the work the contenders whose median times, times a factor, add up to it.
    """

    title: str
    contenders: Sequence[Contender]
    reference: str
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """How long to measure: `rounds`, but none is begun after `seconds` once there are `least` of them."""

    rounds: int
    seconds: float
    least: int = 3


def measure(case: Case, effort: Effort, device: torch.device) -> dict[str, Any]:
    """Return the table of a case: title, number of rounds, one row per contender, seconds of every limit."""
    rows: dict[str, dict[str, Any]] = {}
    reference: list[Tensor] = []
    # The reference first: the others are compared with its values, whose memory is then given back.
    for contender in sorted(case.contenders, key=lambda each: each.name != case.reference):
        rows[contender.name] = _first_calls(contender, reference, device)
    reference.clear()
    running = [contender for contender in case.contenders if not rows[contender.name]["note"]]
    times = _interleave(running, effort, device, {name: row["calls"] for name, row in rows.items()})
    medians = {name: statistics.median(values.values()) for name, values in times.items()}
    limits = {
        name: sum(factor * medians[part] for part, factor in parts.items()) for name, parts in case.limits.items()
    }
    for name, values in times.items():
        rows[name] |= _statistics(values, times.get(OURS), limits)
    ordered = [rows[contender.name] for contender in case.contenders]
    return {"title": case.title, "rounds": max(map(len, times.values())), "rows": ordered, "limits_s": limits}


def _first_calls(contender: Contender, reference: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Warm up, compare values, measure memory."""
    row: dict[str, Any] = {"name": contender.name, "is_limit": contender.is_limit, "note": ""}
    start = time.perf_counter()
    try:
        contender.prepare()
        values = contender.run()
        _synchronize(device)
    except Exception as error:  # a compiler of another project may raise anything
        if not contender.is_optional:
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return row | {"note": f"left out: {first_line[:120]}", "calls": 0}
    row["first_call_s"] = time.perf_counter() - start
    if not contender.is_limit:
        if not reference:
            reference.extend(value.detach().clone() for value in values)
        row["difference"] = max((_difference(a, b) for a, b in zip(values, reference, strict=True)), default=0.0)
    del values
    contender.prepare()
    row["extra_mb"] = extra_memory_mb(contender.run, device)
    row["calls"] = _calls_per_sample(contender, device)
    return row


def _difference(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude of the reference."""
    largest, scale = 0.0, 0.0
    for own, other in zip(value.detach().flatten().split(2**24), reference.flatten().split(2**24), strict=True):
        largest = max(largest, float((own.float() - other.float()).abs().max()))
        scale = max(scale, float(other.float().abs().max()))
    return largest / scale if scale > 0 else largest


def _interleave(
    contenders: Sequence[Contender], effort: Effort, device: torch.device, calls: Mapping[str, int]
) -> dict[str, dict[int, float]]:
    """Return the seconds of each contender by the number of the round."""
    times: dict[str, dict[int, float]] = {contender.name: {} for contender in contenders}
    start = time.perf_counter()
    for number in range(effort.rounds):
        if number >= effort.least and time.perf_counter() - start > effort.seconds:
            break
        gc.collect()
        shift = number % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            if number % contender.every == 0:
                contender.prepare()
                times[contender.name][number] = _time(contender.run, calls[contender.name], device)
    return times


def _time(run: Callable[[], object], calls: int, device: torch.device) -> float:
    gc.disable()
    try:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _synchronize(device)
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def _calls_per_sample(contender: Contender, device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    contender.prepare()
    return max(1, min(100, math.ceil(_GPU_SAMPLE_S / _time(contender.run, 1, device))))


def _statistics(
    times: Mapping[int, float], ours: Mapping[int, float] | None, limits: Mapping[str, float]
) -> dict[str, Any]:
    seconds = list(times.values())
    median = statistics.median(seconds)
    row: dict[str, Any] = {"median_s": median, "spread_s": [min(seconds), max(seconds)], "times_s": seconds}
    if ours is not None:
        row["times_ours"] = statistics.median(own / ours[number] for number, own in times.items() if number in ours)
    return row | {"efficiency": {name: limit / median for name, limit in limits.items()}}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def extra_memory_mb(run: Callable[[], object], device: torch.device) -> float:
    """Return how far memory rises during a call above what is held before it, in megabytes (10^6 bytes).

    Results count, as long as the call makes them; memory that libraries keep from earlier calls does not.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / _MEGABYTE
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before) / _MEGABYTE


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024
