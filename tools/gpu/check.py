"""Build, check and measure the native kernels on a CUDA machine, within a time budget; see tools/gpu_check."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tools.bench.machine import ROOT, conditions, load
from tools.gpu.build import KERNELS, BuildError, BuildPlan, plan_build, run_build
from tools.gpu.toolchain import Toolchain, find_toolchain

# Seconds kept for the parts that follow, while one runs.
_BENCH_FLOOR_S = 120.0
_REPORT_S = 5.0
# Overlap, IPC and NCCL: several processes start.
_TRANSFER_S = 90.0
# What a part needs to be worth its start, and may take beyond its time before it is ended.
_LEAST_S = 10.0
_GRACE_S = 30.0
# What a row may tell beside its name, and its unit.
_FIGURES = {"hidden": "of the shorter hidden", "gb_per_s": "GB/s"}
# For a tool that only says what it is.
_QUERY_S = 30.0


class Budget:
    """The seconds that are left of a whole."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.skipped: list[str] = []

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._end - time.monotonic()

    def fits(self, part: str, seconds: float) -> bool:
        """Say whether a part still fits; one that does not is named in the report."""
        if self.left >= seconds:
            return True
        self.skipped.append(part)
        return False


def main(options: argparse.Namespace) -> int:
    """Do what fits, by the options of tools.gpu.options; return 0 if the build and every check that ran passed."""
    budget = Budget(options.seconds - _REPORT_S)
    try:
        tools = find_toolchain(options.arch, options.cublas)
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    plan = plan_build(tools, options.build_dir)
    say(f"compiling {len(plan.compiles)} files for sm_{tools.arch}, {options.jobs} at a time")
    try:
        seconds = run_build(plan, options.jobs)
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    say(f"built {', '.join(step.output.name for step in plan.links)} in {options.build_dir}")
    if options.compile_only:
        say(describe_build(plan))
        return 0
    reason = why_not_run(plan.missing)
    if reason:
        say(f"nothing was run: {reason}")
        return 1
    os.environ["RL_NATIVE_DIR"] = str(options.build_dir)
    report = {**describe(tools), "build_s": seconds, "load_before": load()}
    report |= run_parts(budget)
    report |= {"skipped": budget.skipped, "seconds": options.seconds - _REPORT_S - budget.left}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return summarise(report, options.out)


def describe_build(plan: BuildPlan) -> str:
    """Return what --compile-only has shown."""
    done = f"done, as --compile-only asks: all {len(plan.compiles)} files compile"
    if plan.missing:
        return f"{done}; to link {KERNELS} too, name the folder of cublasLt.h and its library with --cublas"
    return f"{done}, and all libraries link"


def why_not_run(missing: str) -> str:
    """Return why the build is not tried out, or ""."""
    if missing:
        return missing
    return "" if torch.cuda.is_available() else "torch sees no CUDA device; add --compile-only where none is expected"


def run_parts(budget: Budget) -> dict[str, Any]:
    """Run parity, transfers, benchmarks and the memory checker; each in a process of its own: a fault ends only it."""
    parity = run_part("parity", budget.left - _BENCH_FLOOR_S, budget)
    transfer = run_part("transfer", min(_TRANSFER_S, budget.left - _BENCH_FLOOR_S), budget)
    benches = run_part("benches", budget.left - _GRACE_S, budget)
    sanitizer = run_sanitizer(budget)
    return {"parity": parity, "transfer": transfer, "benches": benches, "sanitizer": sanitizer}


def run_part(part: str, seconds: float, budget: Budget) -> list[dict[str, Any]]:
    """Run one part and return its rows, those before a fault too."""
    if seconds < _LEAST_S:
        budget.skipped.append(part)
        return []
    command = [sys.executable, "-m", "tools.gpu.part", part, str(seconds)]
    rows = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=child_environment()) as process:
        # A kernel that never ends must not take the report with it.
        watchdog = threading.Timer(max(1.0, min(seconds + _GRACE_S, budget.left)), process.kill)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            say(describe_row(row))
            rows.append({key: value for key, value in row.items() if key != "text"})
        process.wait()
        watchdog.cancel()
    if process.returncode != 0:
        rows.append({"name": f"{part}: the process ended with status {process.returncode}", "ok": False})
    budget.skipped += [row["name"] for row in rows if row.get("skipped")]
    return [row for row in rows if not row.get("skipped")]


def run_sanitizer(budget: Budget) -> str:
    """Run a few checks under compute-sanitizer; return its last line, or why it did not run."""
    checks = "logprobs bfloat16 V=1000 stride +3,policy loss,bucket copy,float8,digests"
    if not budget.fits("compute-sanitizer", 45.0):
        return "no time"
    command = [
        "compute-sanitizer",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "tools.gpu.part",
        "parity",
        "40",
        checks,
    ]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=budget.left, check=False, env=child_environment()
        )
    except FileNotFoundError:
        return "compute-sanitizer is not installed"
    except subprocess.TimeoutExpired:
        return "stopped for want of time"
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    return f"status {done.returncode}: {lines[-1] if lines else 'no output'}"


def child_environment() -> dict[str, str]:
    """Return the environment of a part: this tree on the path, one thread per core for the CPU's side."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def describe(tools: Toolchain) -> dict[str, Any]:
    """Return machine, driver and versions."""
    nvcc = subprocess.run(
        [str(tools.nvcc), "--version"], capture_output=True, text=True, check=False, timeout=_QUERY_S
    ).stdout
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_QUERY_S).stdout.strip()
    except FileNotFoundError:
        driver = "no nvidia-smi"
    except subprocess.TimeoutExpired:
        driver = f"nvidia-smi did not answer in {_QUERY_S:.0f} s"
    return {
        "benchmark": "gpu_check",
        **conditions(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "nvcc": nvcc.strip().splitlines()[-1] if nvcc else "unknown",
        "arch": tools.arch,
        "kernels": KERNELS,
    }


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a row for the console."""
    if row.get("skipped"):
        return f"left out  {row['name']}"
    if "text" in row:
        return f"\n{row['text']}"
    told = [f"{row[key]:.3g} {unit}" for key, unit in _FIGURES.items() if key in row]
    told += [str(row[key]) for key in ("worst", "note", "error") if key in row]
    return "  ".join(["ok  " if row["ok"] else "FAIL", row["name"], *told])


def summarise(report: Mapping[str, Any], out: Path) -> int:
    """Say what came out; return the exit status."""
    failed = [row["name"] for part in ("parity", "transfer", "benches") for row in report[part] if not row["ok"]]
    say(f"{len(report['parity'])} checks, {len(report['benches'])} tables, {len(failed)} failed; written to {out}")
    say(f"compute-sanitizer: {report['sanitizer']}")
    for name in report["skipped"]:
        say(f"no time for: {name}")
    for name in failed:
        say(f"failed: {name}")
    return 1 if failed or not report["parity"] else 0


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)
