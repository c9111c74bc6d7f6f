"""Picture of one or more runs from their metrics.jsonl: training loss by step and held-out loss.

python tests/benchmarks/plot_run.py outputs/<name> [outputs/<name> ...] --out tests/benchmarks/main_job.png
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 4), dpi=110)
    for run in args.runs:
        draw(axes, run)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out)


def draw(axes: plt.Axes, run: Path) -> None:
    """Training loss as a line, held-out loss per source as points before and after, stage borders dashed."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run / "result.json").read_text())
    train = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r]
    axes.plot(*zip(*train, strict=True), label=f"{run.name}: training", linewidth=1.5)
    for name in result["data"]:
        key = f"eval/loss_{name}"
        held_out = [(r["step"], r[key]) for r in records if key in r]
        axes.plot(*zip(*held_out, strict=True), "o--", markersize=5, linewidth=0.8, label=f"held out: {name}")
    end = 0
    for stage in result["stages"]:
        axes.text(end + 1, axes.get_ylim()[1], f" stage {stage['name']}", fontsize=8, va="top")
        end += stage["steps"]
        axes.axvline(end, color="gray", linewidth=0.6, linestyle="--")


if __name__ == "__main__":
    main()
