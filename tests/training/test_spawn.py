"""Processes of a spawned run: they die with their parent, stop together, and only rank 0 writes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.training.runs import REPOSITORY, run

LONG = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "lora=all_linear_r8",
    "debug=smoke",
    "trainer.max_stage_steps=100000",
    "curriculum.stages.text.steps=100000",
    "trainer.log_every_steps=1",
    "hw.parallel=spawn",
    "name=long",
)
MODES = {"eager_2": ("hw.runtime=eager", "hw.num_devices=2"), "xla": ()}


def start(output_dir: Path, *mode: str) -> "subprocess.Popen[bytes]":
    """A run that would take hours, already training."""
    command = [sys.executable, "run.py", f"output_dir={output_dir}", *LONG, *mode]
    with (output_dir / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
    metrics = output_dir / "long" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and b"train/loss" in metrics.read_bytes()):
        assert process.poll() is None, (output_dir / "log").read_text()
        assert time.monotonic() < deadline, "no training record within 120 s"
        time.sleep(0.2)
    return process


def wait_gone(children: list[psutil.Process]) -> list[psutil.Process]:
    """The children that are still there after 20 s."""
    _, alive = psutil.wait_procs(children, timeout=20)
    return alive


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_killed_parent_leaves_no_orphan(tmp_path, mode):
    process = start(tmp_path, *mode)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    process.wait()
    assert wait_gone(children) == []


def test_sigterm_saves_and_another_config_is_refused(tmp_path):
    mode = MODES["eager_2"]
    process = start(tmp_path, *mode)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert wait_gone(children) == []
    (checkpoint,) = (tmp_path / "long" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert step >= 1
    assert (checkpoint / "COMMIT.json").exists()
    assert "stopped on request" in (tmp_path / "log").read_text()
    done = run(*LONG, *mode, "curriculum.stages.text.steps=1", output_dir=tmp_path)
    assert done.returncode == 2
    assert "curriculum.stages.text.steps=100000, now 1" in done.stderr
