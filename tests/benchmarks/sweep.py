"""A 2 x 3 sweep on the CPU device that is stopped once, killed once and continued, and a picture of what came out.

python tests/benchmarks/sweep.py --folder /tmp/sweep --out tests/benchmarks/sweep.png
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import psutil

mpl.use("Agg")
import matplotlib.pyplot as plt

REPOSITORY = Path(__file__).parents[2]
KEYS = ("lora.r", "optim.lr")
COMMAND = [
    sys.executable, "run.py", "-m", "lora.r=4,16", "optim.lr=3e-4,1e-3,3e-3", "name=rank_and_rate",
    "model=tiny", "data=sample_chat", "curriculum=single", "trainer.max_stage_steps=40", "trainer.seq_len=128",
    "trainer.global_batch_rows=8", "trainer.log_every_steps=1", "trainer.eval_every_steps=10",
    "trainer.max_eval_rows=32", "sample.max_new_tokens=0", "sweeping.points_at_once=2",
]  # fmt: skip
STOPPED = 75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="output_dir; a new one")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sweep = args.folder / "sweeps" / "rank_and_rate"
    for number, finished in ((signal.SIGTERM, 1), (signal.SIGKILL, 3)):
        code, seconds = interrupted(args.folder, sweep, number=number, finished=finished)
        left = [row["name"] for row in rows(sweep) if row["status"] != "finished"]
        print(f"{number.name} after {finished} points and {seconds:.1f} s: exit code {code}, {len(left)} points left")
    began = time.monotonic()
    subprocess.run([*COMMAND, f"output_dir={args.folder}"], cwd=REPOSITORY, check=True)
    print(f"continued to the end in {time.monotonic() - began:.1f} s")
    for row in rows(sweep):
        lives, again = lives_and_repeats(Path(row["folder"]))
        print(f"{row['name']}: {row['status']}, {lives} lives, steps logged twice: {again}")
    print((sweep / "leaderboard.md").read_text())
    draw(sweep / "leaderboard.csv", out=args.out)


def rows(sweep: Path) -> list[dict[str, Any]]:
    """The points as the sweep has written them down."""
    file = sweep / "sweep.json"
    return json.loads(file.read_text())["points"] if file.exists() else []


def interrupted(folder: Path, sweep: Path, *, number: signal.Signals, finished: int) -> tuple[int, float]:
    """Run until so many points are finished and another has begun to train, then send the signal to the parent."""
    began = time.monotonic()
    with subprocess.Popen([*COMMAND, f"output_dir={folder}"], cwd=REPOSITORY) as process:
        while sum(row["status"] == "finished" for row in rows(sweep)) < finished or not in_training(sweep):
            assert process.poll() is None, "the sweep ended before"
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        code = process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"{alive} outlived the sweep"
    assert code == (STOPPED if number == signal.SIGTERM else -number)
    return code, time.monotonic() - began


def in_training(sweep: Path) -> bool:
    """Whether a point that is not finished has logged steps."""
    files = (f for f in sweep.glob("*/metrics.jsonl") if not (f.parent / "result.json").exists())
    return any('"train/loss"' in file.read_text() for file in files)


def lives_and_repeats(run: Path) -> tuple[int, int]:
    """Processes that worked on the point, and steps that its metrics hold more than once."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "train/loss" in record]
    account = json.loads((run / "result.json").read_text())["goodput"]["run"]
    return account["lives"], len(steps) - len(set(steps))


def draw(table: Path, *, out: Path) -> None:
    """Parallel coordinates of the swept values and the held-out loss, and the loss as a map."""
    with table.open() as file:
        points = [{name: float(row[name]) for name in (*KEYS, "eval_loss")} for row in csv.DictReader(file)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), dpi=110, width_ratios=(3, 2))
    coordinates(left, points)
    heat_map(right, points)
    figure.tight_layout()
    figure.savefig(out)


def coordinates(axes: plt.Axes, points: list[dict[str, float]]) -> None:
    """One line per point; every axis from its lowest to its highest value, equal steps between the values tried."""
    names = [*KEYS, "eval_loss"]
    losses = [point["eval_loss"] for point in points]
    colours = mpl.colormaps["viridis_r"]
    heights = []
    for at, name in enumerate(names):
        values = sorted({point[name] for point in points})
        low, high = values[0], values[-1]
        if name in KEYS:
            heights.append({value: index / (len(values) - 1) for index, value in enumerate(values)})
        else:
            heights.append({value: (value - low) / (high - low or 1.0) for value in values})
        axes.axvline(at, color="gray", linewidth=0.8)
        for value in values if name in KEYS else (low, high):
            axes.text(at + 0.03, heights[at][value] + 0.03, f"{value:,.4g}", fontsize=9, va="bottom")
    for point in points:
        share = (point["eval_loss"] - min(losses)) / (max(losses) - min(losses) or 1.0)
        line = [heights[at][point[name]] for at, name in enumerate(names)]
        axes.plot(range(len(names)), line, color=colours(0.9 * (1 - share)), linewidth=3 if share == 0 else 1.5)
    axes.set_xticks(range(len(names)), [*KEYS, "held-out loss"])
    axes.set(yticks=[], title="6 points; the thick line is the best")
    axes.set(xlim=(-0.2, len(names) - 0.7), ylim=(-0.06, 1.14))


def heat_map(axes: plt.Axes, points: list[dict[str, float]]) -> None:
    """Held-out loss over the two swept values."""
    ranks, rates = (sorted({point[key] for point in points}) for key in KEYS)
    loss = {(point["lora.r"], point["optim.lr"]): point["eval_loss"] for point in points}
    image = axes.imshow([[loss[r, lr] for lr in rates] for r in ranks], cmap="viridis", aspect="auto")
    middle = (min(loss.values()) + max(loss.values())) / 2
    for y, r in enumerate(ranks):
        for x, lr in enumerate(rates):
            value = loss[r, lr]
            axes.text(x, y, f"{value:.3f}", ha="center", va="center", color="w" if value < middle else "k")
    axes.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates])
    axes.set_yticks(range(len(ranks)), [f"{r:g}" for r in ranks])
    axes.set(xlabel="optim.lr", ylabel="lora.r", title="held-out loss, nats per token")
    axes.figure.colorbar(image, ax=axes)


if __name__ == "__main__":
    main()
