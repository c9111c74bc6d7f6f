"""The process tree of a run: signals stop it together with a checkpoint, and no child outlives its parent."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests import forks
from tests.tiers import only
from tests.training.runs import SAME_SUMS, run

LONG = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "lora=all_linear_r8",
    "debug=smoke",
    "trainer.max_stage_steps=100000",
    "curriculum.stages.text.steps=100000",
    "trainer.max_eval_rows=8",
    "sample.max_new_tokens=0",
    "name=long",
)
MODES = {
    "inline": (),
    "spmd_2": ("hw.parallel=spmd", "hw.num_devices=2"),
    "spawn": ("hw.parallel=spawn",),
    "eager_spawn_2": ("hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=2"),
}
WITH_CHILDREN = [name for name, overrides in MODES.items() if "hw.parallel=spawn" in overrides]


def start(output_dir: Path, *overrides: str) -> forks.Process:
    """A run that would take hours, already training."""
    command = ["run.py", f"output_dir={output_dir}", *LONG, *overrides]
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    with (output_dir / "log").open("wb") as log:
        process = forks.start(command, env=kept | SAME_SUMS, stdout=log, stderr=log)
    metrics = output_dir / "long" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and b"train/loss" in metrics.read_bytes()):
        assert process.poll() is None, (output_dir / "log").read_text()
        assert time.monotonic() < deadline, "no training record within 240 s"
        time.sleep(0.2)
    return process


def wait_gone(children: list[psutil.Process]) -> list[psutil.Process]:
    """The children that are still there after 20 s."""
    _, alive = psutil.wait_procs(children, timeout=20)
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("mode", only(["eager_spawn_2"], WITH_CHILDREN))
def test_killed_parent_leaves_no_orphan(tmp_path, mode):
    process = start(tmp_path, *MODES[mode], "trainer.log_every_steps=1")
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    process.wait()
    assert wait_gone(children) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", only(["spawn"], ["inline", "spawn", "spmd_2", "eager_spawn_2"]))
def test_sigterm_saves_at_the_next_step_and_ends_every_process(tmp_path, mode):
    """A second one, to all as a service manager sends it, changes nothing. Records are rare, so none is waited for."""
    process = start(tmp_path, *MODES[mode], "trainer.log_every_steps=50")
    children = psutil.Process(process.pid).children(recursive=True)
    assert bool(children) == (mode in WITH_CHILDREN)
    asked = time.monotonic()
    process.terminate()
    time.sleep(0.05)
    for each in (*children, process):
        each.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75, (tmp_path / "log").read_text()
    print(f"{mode}: exit {time.monotonic() - asked:.2f} s after SIGTERM")
    assert wait_gone(children) == []
    (checkpoint,) = (tmp_path / "long" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step_")) >= 50
    assert (checkpoint / "COMMIT.json").exists()
    assert (tmp_path / "log").read_text().count("stopped on request") == 1
    if mode == "inline":
        done = run(*LONG, "curriculum.stages.text.steps=1", output_dir=tmp_path)
        assert done.returncode == 2
        assert "curriculum.stages.text.steps=100000, now 1" in done.stderr
