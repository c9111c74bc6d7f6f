"""A sweep on the real command line: a request to stop reaches the point that runs, and no point outlives the sweep."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forks
from tests.jobs import TINY_JOB
from tests.training.runs import REPOSITORY, SAME_SUMS, run

POINTS = (
    "-m", *TINY_JOB, "debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single",
    "curriculum.stages.main.steps=100000", "trainer.max_stage_steps=100000", "logger=jsonl", "name=tried",
    "trainer.log_every_steps=1", "lora.r=4,8,16",
)  # fmt: skip


WRITTEN = ("sweep.json", "leaderboard.csv", "leaderboard.md")


@contextmanager
def started(folder: Path) -> Iterator[forks.Process]:
    """The sweep; killed where a test fails."""
    command = [str(REPOSITORY / "run.py"), *POINTS, f"output_dir={folder}/outputs"]
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    with forks.start(command, cwd=folder, env=kept | SAME_SUMS, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_training(process: forks.Process, folder: Path, *, after: int = 0) -> Path:
    """The run folder of the first point, once it has a training record of a step above `after`."""
    point = folder / "outputs" / "sweeps" / "tried" / "lora.r=4"
    deadline = time.monotonic() + 240
    while not (steps := steps_of(point)) or max(steps) <= after:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no training record within 240 s"
        time.sleep(0.1)
    return point


def steps_of(point: Path) -> list[int]:
    """Steps of the training records, in whole lines."""
    file = point / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [record["step"] for line in lines if "train/loss" in (record := json.loads(line))]


def rows_of(sweep: Path) -> list[dict[str, Any]]:
    """The points as the sweep has written them down."""
    rows: list[dict[str, Any]] = json.loads((sweep / "sweep.json").read_text())["points"]
    return rows


def test_a_stopped_sweep_saves_says_what_is_left_and_resumes(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        point = wait_for_training(process, tmp_path)
        process.terminate()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "stopped on request; the same command resumes from" in said
    (line,) = [line for line in said.splitlines() if line.startswith("the sweep was stopped on request")]
    left = line.partition("resumes with ")[2].split("; ")
    assert left == [f"lora.r={r}" for r in (4, 8, 16)]
    assert {path.name for path in point.parent.iterdir()} == {point.name, "prepared", *WRITTEN}
    assert [row["status"] for row in rows_of(point.parent)] == ["stopped", "waiting", "waiting"]
    (checkpoint,) = (point / "checkpoints").iterdir()
    saved = int(checkpoint.name.removeprefix("step_"))
    assert saved > 0

    with started(tmp_path) as process:
        wait_for_training(process, tmp_path, after=saved)
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        assert psutil.wait_procs([child], timeout=20)[1] == []
    assert steps_of(point)[: saved + 1] == list(range(1, saved + 2))
    assert not list(tmp_path.rglob("multirun.yaml"))


SMALL = ("debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single", "logger=jsonl")


@pytest.mark.slow
def test_a_failed_point_does_not_end_the_sweep_and_a_finished_one_is_not_run_again(tmp_path: Path) -> None:
    points = ("-m", *SMALL, "name=tried", "lora.targets=[q_proj],[nowhere]", "sweeping.points_at_once=2")
    ended = run(*points, output_dir=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "sweep point lora.targets=nowhere ended with exit code 2; the sweep continues" in ended.stderr
    sweep = tmp_path / "sweeps" / "tried"
    good, bad = rows_of(sweep)
    result = json.loads((sweep / good["name"] / "result.json").read_text())
    assert (good["status"], good["eval_loss"]) == ("finished", result["eval_loss"])
    assert (bad["status"], bad["exit_code"]) == ("failed", 2)
    assert "lora.targets" in (sweep / "logs" / f"{bad['name']}.log").read_text()
    assert not (sweep / bad["name"]).exists()
    assert f"Best: lora.targets=[q_proj], held-out loss {result['eval_loss']:.4f}" in ended.stdout
    assert (sweep / "leaderboard.md").exists()
    assert [path.name for path in (sweep / "tensorboard").iterdir()] == [good["name"]]

    again = run(*points, output_dir=tmp_path)
    assert again.returncode == 1
    starts = [line for line in again.stdout.splitlines() if " -> " in line]
    assert starts == [f"sweep point {bad['name']} -> {sweep}/{bad['name']}"]
    assert f"sweep point {good['name']} was finished before" in again.stdout
    other = run(*points, "seed=1", output_dir=tmp_path)
    assert other.returncode == 2
    assert other.stderr.startswith("error: name=tried; ")
    assert "seed=0, now 1; choose another name=" in other.stderr


@pytest.mark.slow
def test_optuna_draws_points_and_a_bad_one_is_stopped_early(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    steps = ("curriculum.stages.main.steps=60", "trainer.max_stage_steps=60", "trainer.eval_every_steps=5")
    points = ("sweep=optuna_lora", *SMALL, *steps, "name=drawn", "hydra.sweeper.n_trials=2")
    ended = run(*points, "sweeping.prune_after_points=1", output_dir=tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = rows_of(tmp_path / "sweeps" / "drawn")
    assert set(first["changed"]) == {"lora.r", "lora.alpha", "optim.lr"}
    assert first["status"] == "finished"
    assert second["status"] == "pruned"
    losses = {}
    for row in (first, second):
        lines = (Path(row["folder"]) / "metrics.jsonl").read_text().splitlines()
        losses[row["name"]] = {r["step"]: r["eval/loss"] for line in lines if "eval/loss" in (r := json.loads(line))}
    assert second["eval_loss"] == losses[second["name"]][second["step"]] > losses[first["name"]][second["step"]]
    assert not (Path(second["folder"]) / "result.json").exists()

    again = run(*points, "sweeping.prune_after_points=1", output_dir=tmp_path)
    assert again.returncode == 0, again.stderr
    assert " -> " not in again.stdout  # the seed draws the same points
    assert rows_of(tmp_path / "sweeps" / "drawn") == [first, second]
