"""Samples per second of a whole training step: the default recipe against TRL's GRPOTrainer, in turn on this machine.

    tools/python tools/bench/bench_step.py                 3 rounds of 6 steps; about 15 minutes on 2 cores
    tools/python tools/bench/bench_step.py --rounds 1 --steps 3 --out /tmp/step.json

Both train the same model on the same prompts with the same group size, lengths, sampling and optimizer, on the same
number of threads. Tandem runs twice: as it is, and with policy.skip_zero_advantages=false. The first step of every run
(caches, compilation) is left out of the medians and reported apart. TRL lives in an environment of its own
(third_party/python/trl.in), which is made when it is missing. It writes JSON with every step of every run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl.controller.config import MasterConfig
from rl.controller.load import load_config
from rl.core.config_paths import find_config
from rl.data.datasets import load_rows
from rl.data.pretrained import resolve_model
from tools.bench.machine import ROOT, conditions

CONFIG = "grpo_smollm2_cpu"
TIMEOUT_S = 3600
VARIANTS = {"tandem": [], "tandem_no_skip": ["policy.skip_zero_advantages=false"]}
PEER = "trl"


def peer_python() -> Path:
    """Return the interpreter of TRL's environment; makes it when it is missing."""
    script = ROOT / "third_party" / "python" / "make_env.py"
    made = subprocess.run(
        [sys.executable, str(script), "--flavor", PEER],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Path(made.stdout.splitlines()[-1]) / "bin" / "python"


def recipe() -> MasterConfig:
    """Return the default recipe."""
    return load_config(find_config(CONFIG), [])[0]


def peer_task(steps: int, seed: int) -> dict[str, Any]:
    """Return what trl_grpo.py trains: the default recipe, read from its configuration."""
    config = recipe()
    policy, grpo = config.policy, config.grpo
    rows = load_rows(config.data.train)
    assert policy.generation.stop_token_ids is not None
    return {
        "model": str(resolve_model(policy.model_name)),
        "rows": [{"prompt": row.messages[0].content, "answer": row.metadata["answer"]} for row in rows],
        "steps": steps,
        "seed": seed,
        "prompts_per_step": grpo.num_prompts_per_step,
        "generations": grpo.num_generations_per_prompt,
        "max_new_tokens": policy.generation.max_new_tokens,
        "stop_token_id": policy.generation.stop_token_ids[0],
        "lr": policy.optimizer.kwargs.lr,
        "betas": list(policy.optimizer.kwargs.betas),
        "threads": os.cpu_count(),
    }


def run_peer(python: Path, steps: int, seed: int, folder: Path) -> list[dict[str, float]]:
    """Train with TRL; return seconds by phase for every step, with its mean reward."""
    task, times = folder / "task.json", folder / "times.json"
    task.write_text(json.dumps(peer_task(steps, seed)))
    command = [str(python), str(ROOT / "tools" / "bench" / "trl_grpo.py"), str(task), str(times)]
    with (folder / "trl.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, cwd=folder)
    report = json.loads(times.read_text())
    return [
        {**step, "training": step["total"] - step["generation"], "reward": reward}
        for step, reward in zip(report["steps"], report["rewards"], strict=True)
    ]


def run_tandem(overrides: list[str], steps: int, seed: int, folder: Path) -> list[dict[str, float]]:
    """Train with the normal command; return seconds by phase for every step, with its mean reward."""
    off = ["grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.enabled=false", "grpo.val_period=0"]
    settings = [
        f"grpo.max_num_steps={steps}",
        f"grpo.seed={seed}",
        f"logger.log_dir={folder / 'run'}",
        *off,
        *overrides,
    ]
    command = [sys.executable, "-m", "rl", "train", "--config", CONFIG, *settings]
    with (folder / "tandem.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, cwd=ROOT)
    (metrics,) = (folder / "run").glob("**/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [_phases(row) for row in rows if "train/reward" in row]


def _phases(row: dict[str, float]) -> dict[str, float]:
    prefix = "timing/train/"
    phases = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
    phases["total"] = phases.pop("total_step_time")
    return phases | {"reward": row["train/reward"]}


def summarise(runs: list[list[dict[str, float]]], samples_per_step: int) -> dict[str, Any]:
    """Return medians over the steps after the first of every run, and samples per second over all of those."""
    first = [run[0]["total"] for run in runs]
    later = [step for run in runs for step in run[1:]]
    totals = [step["total"] for step in later]
    names = sorted({name for step in later for name in step})
    return {
        "seconds_per_step": statistics.median(totals),
        "seconds_per_step_spread": [min(totals), max(totals)],
        "first_step_seconds": statistics.median(first),
        "samples_per_second": samples_per_step * len(totals) / sum(totals),
        "samples_per_second_with_first_step": samples_per_step
        * (len(totals) + len(first))
        / (sum(totals) + sum(first)),
        "phases": {name: statistics.median([step.get(name, 0.0) for step in later]) for name in names},
    }


def measure(rounds: int, steps: int) -> dict[str, list[list[dict[str, float]]]]:
    """Run every variant once per round, in turn."""
    python = peer_python()
    runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in (*VARIANTS, PEER)}
    for seed in range(1, rounds + 1):
        for name in runs:
            with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
                folder = Path(scratch)
                is_peer = name == PEER
                run = (
                    run_peer(python, steps, seed, folder)
                    if is_peer
                    else run_tandem(VARIANTS[name], steps, seed, folder)
                )
            runs[name].append(run)
            seconds = ", ".join(f"{step['total']:.2f}" for step in run)
            print(f"round {seed} {name}: {seconds} s", flush=True)
    return runs


def main() -> None:
    """Parse the command line, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "bench" / "results" / "step.json")
    options = parser.parse_args()
    runs = measure(options.rounds, options.steps)
    samples = recipe().sequences_per_step
    summary = {name: summarise(all_runs, samples) for name, all_runs in runs.items()}
    peer = summary[PEER]
    for name in VARIANTS:
        # Round by round, so that a machine that drifts does not enter the ratio.
        pairs = [
            peer_step["total"] / own_step["total"]
            for own, other in zip(runs[name], runs[PEER], strict=True)
            for own_step, peer_step in zip(own[1:], other[1:], strict=True)
        ]
        summary[name]["ratio_per_step"] = statistics.median(pairs)
        for kind in ("", "_with_first_step"):
            own_rate, peer_rate = (values[f"samples_per_second{kind}"] for values in (summary[name], peer))
            summary[name][f"ratio_overall{kind}"] = own_rate / peer_rate
    report = {
        "benchmark": "step",
        **conditions(),
        "summary": summary,
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, values in summary.items():
        ratio = f", {values['ratio_overall']:.2f} x {PEER}" if "ratio_overall" in values else ""
        print(f"{name}: {values['seconds_per_step']:.2f} s/step, {values['samples_per_second']:.1f} samples/s{ratio}")
        phases = {phase: seconds for phase, seconds in values["phases"].items() if phase != "reward"}
        print("  " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items()))


if __name__ == "__main__":
    main()
