"""A sweep on the real command line: a request to stop reaches the point that runs, and no point outlives the sweep."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from run import point_name
from tests.training.runs import REPOSITORY, SAME_SUMS

POINTS = (
    "-m", "debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single", "trainer.log_every_steps=1",
    "curriculum.stages.main.steps=100000", "trainer.max_stage_steps=100000", "logger=jsonl", "name=tried",
    "lora.r=4,8,16",
)  # fmt: skip


@contextmanager
def started(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """The sweep; killed where a test fails."""
    command = [sys.executable, str(REPOSITORY / "run.py"), *POINTS, f"output_dir={folder}/outputs"]
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=kept | SAME_SUMS, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_training(process: "subprocess.Popen[str]", folder: Path, *, after: int = 0) -> Path:
    """The run folder of the first point, once it has a training record of a step above `after`."""
    point = folder / "outputs" / "sweeps" / "tried" / point_name([*POINTS[1:-2], "lora.r=4"])
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


def test_a_stopped_sweep_saves_says_what_is_left_and_goes_on(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        point = wait_for_training(process, tmp_path)
        process.terminate()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "stopped on request; the same command goes on from" in said
    (line,) = [line for line in said.splitlines() if line.startswith("the sweep was stopped on request")]
    left = line.partition("goes on with ")[2].split("; ")
    assert left == [point_name([*POINTS[1:-2], f"lora.r={r}"]) for r in (4, 8, 16)]
    assert {path.name for path in point.parent.iterdir()} == {point.name, "prepared"}
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
