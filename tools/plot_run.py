"""Draw the reward curves of one or more run folders into a picture (the README's is made by it).

python tools/plot_run.py --out docs/images/reward.png "seed 0=results/grpo_smollm2_cpu/exp_001" "lr 0=results/..."
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def read_series(folder: Path, key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric of a run folder's metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def main() -> None:
    """Parse the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="LABEL=RUN_FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure, (train, heldout) = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for run in arguments.runs:
        label, _, folder = run.partition("=")
        train.plot(*read_series(Path(folder), "train/reward"), label=label)
        heldout.plot(*read_series(Path(folder), "validation/accuracy"), marker="o", label=label)
    train.set(title="train/reward", xlabel="step", ylim=(0, 1.02))
    heldout.set(title="validation/accuracy (held out, greedy)", xlabel="step")
    train.grid(alpha=0.3)
    heldout.grid(alpha=0.3)
    train.legend(fontsize="small")
    figure.tight_layout()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
