"""A run in a bucket, killed twice and resumed, read back from the bucket's own event files and drawn.

    python -m tests.benchmarks.bucket_run --out tests/benchmarks/bucket_run.png

The bucket is the emulator. Each life kills itself (SIGKILL) some steps after a checkpoint, and its machine's disk is
removed. Drawn are what TensorBoard's own reader finds below `gs://`, and what each life logged by itself.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from tests.benchmarks.outage import REPOSITORY, Bucket
from tests.jobs import TINY_JOB

RUN = "gs://bkt/runs/bucket_run"
SETTINGS = (
    *TINY_JOB, "debug=smoke", "hw.runtime=eager", "trainer.max_stage_steps=120", "trainer.log_every_steps=1",
    "trainer.eval_every_steps=20", "checkpoint.every_steps=20", "curriculum.stages.text.steps=120",
    "curriculum.stages.chat.steps=120", "sample.max_new_tokens=0", "name=bucket_run", "output_dir=gs://bkt/runs",
)  # fmt: skip
KILLS = (75, 172)


def live(events: Path, *, kill: int | None) -> None:
    """One life, on a disk of its own, which is gone after it."""
    options = f"path: '{events}'"
    if kill is not None:
        options += f", kill_after: {kill}, marker: checkpoints/step_{kill // 20 * 20:08d}/COMMIT.json"
    probe = f"+logger={{probe: {{_target_: tpu_experiments.loggers.probe.Probe, options: {{{options}}}}}}}"
    with tempfile.TemporaryDirectory() as disk:
        env = os.environ | {"TMPDIR": disk, "XDG_CACHE_HOME": disk}
        code = subprocess.run([sys.executable, "run.py", *SETTINGS, probe], cwd=REPOSITORY, env=env, check=False)
    assert code.returncode == (0 if kill is None else -signal.SIGKILL), code


def curves_of(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Scalars as TensorBoard reads them from the bucket."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def lives_of(events: Path) -> list[list[tuple[int, float]]]:
    """(step, loss) of each life, what a kill undid included."""
    lives: list[list[tuple[int, float]]] = []
    for event in map(json.loads, events.read_text().splitlines()):
        if event["event"] == "start":
            lives.append([])
        elif event["event"] == "read":
            lives[-1].append((event["step"], event["loss"]))
    return lives


def draw(curves: dict[str, list[tuple[int, float]]], lives: list[list[tuple[int, float]]], out: Path) -> None:
    """One curve as the bucket holds it; each life's own below it, shifted for the eye."""
    figure, axes = plt.subplots(figsize=(8, 4), dpi=110)
    axes.plot(*zip(*curves["train/loss"], strict=True), linewidth=1.2, label="train/loss, read from gs://")
    held_out = [tag for tag in sorted(curves) if tag.startswith("eval/loss_")]
    for tag in held_out:
        axes.plot(*zip(*curves[tag], strict=True), "o--", markersize=3, linewidth=0.8, label=tag)
    for number, life in enumerate(lives, 1):
        shifted = [(step, loss - 0.4) for step, loss in life]
        label = f"life {number}: steps {life[0][0]} to {life[-1][0]} (drawn 0.4 lower)"
        axes.plot(*zip(*shifted, strict=True), linewidth=0.8, label=label)
    for kill in KILLS:
        axes.axvline(kill, color="gray", linewidth=0.7, linestyle=":")
        axes.text(kill + 1, axes.get_ylim()[0], " SIGKILL, disk lost", fontsize=7, va="bottom")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper center", ncols=2)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bucket = Bucket()
    os.environ |= {"STORAGE_EMULATOR_HOST": bucket.address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        for kill in (*KILLS, None):
            live(events, kill=kill)
        lives = lives_of(events)
    curves = curves_of(f"{RUN}/tensorboard")
    steps = [step for step, _ in curves["train/loss"]]
    assert steps == list(range(1, max(steps) + 1)), "a step is missing or there twice"
    print(f"{len(steps)} steps, each once, from {len(lives)} lives")
    draw(curves, lives, arguments.out)
    bucket.server.stop()


if __name__ == "__main__":
    main()
