"""Points on a Ray cluster of this machine: the local engine's table, stops, losses and repeats; what is refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.config.composing import composed
from tests.jobs import TINY_JOB
from tests.training.runs import REPOSITORY, SAME_SUMS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.sweeping.engines import node
from tpu_experiments.sweeping.engines.ray_tasks import RayEngine, resources_of, unplaced

pytest.importorskip("ray", reason="the extra ray is not installed")

SMALL = (
    "-m", *TINY_JOB, "debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single", "logger=jsonl",
    "name=tried",
)  # fmt: skip
ON_RAY = "sweeping.engine=ray"
ROOT = str(REPOSITORY)


@contextmanager
def started(*words: str, folder: Path, env: dict[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A sweep in a process of its own, for which Ray starts a cluster; killed where a test fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    command = [sys.executable, str(REPOSITORY / "run.py"), *SMALL, *words, f"output_dir={folder}/outputs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = kept | SAME_SUMS | (env or {})
    ignoring = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as below nohup and in the background of a script
    try:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    finally:
        signal.signal(signal.SIGINT, ignoring)
    with process:
        try:
            yield process
        finally:
            process.kill()


def swept(*words: str, folder: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a sweep to its end; return its exit code and what it said."""
    with started(*words, folder=folder, env=env) as process:
        stdout, stderr = process.communicate(timeout=400)
    return process.returncode, stdout, stderr


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of sweep.json by point."""
    points = json.loads((folder / "outputs/sweeps/tried/sweep.json").read_text())["points"]
    return {each["name"]: each for each in points}


def steps_of(point: Path) -> list[int]:
    """Steps of the training records, in whole lines."""
    file = point / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [record["step"] for line in lines if "train/loss" in (record := json.loads(line))]


def wait_for_step(process: "subprocess.Popen[str]", point: Path, step: int) -> psutil.Process:
    """Wait until the point has trained beyond a step; return its process."""
    deadline = time.monotonic() + 240
    while max(steps_of(point), default=0) <= step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no step above {step} within 240 s"
        time.sleep(0.1)
    (child,) = [each for each in psutil.process_iter() if is_run_of(each, point)]
    return child


def is_run_of(process: psutil.Process, point: Path) -> bool:
    """Whether a process trains that point."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return f"output_dir='{point.parent}'" in words and f"name='{point.name}'" in words
    return False


@pytest.mark.slow
def test_the_leaderboard_is_that_of_the_local_engine_and_finished_points_are_not_repeated(tmp_path: Path) -> None:
    grid = ("lora.r=4,8,16", "sweeping.points_at_once=2")
    tables, rows = {}, {}
    for engine in ("local", "ray"):
        folder = tmp_path / engine
        code, stdout, stderr = swept(*grid, f"sweeping.engine={engine}", folder=folder)
        assert code == 0, stderr
        rows[engine] = rows_of(folder)
        lines = (folder / "outputs/sweeps/tried/leaderboard.md").read_text().splitlines()
        table = [line.split("|") for line in lines if line.startswith("|")]
        tables[engine] = [cells[:5] + cells[6:7] + cells[8:] for cells in table]  # without tokens/s and seconds
        assert "Best: lora.r=16, held-out loss" in stdout
    assert tables["ray"] == tables["local"]
    assert len(tables["ray"]) == 5
    exact = ("eval_loss_before", "eval_loss", "num_trainable", "status", "exit_code")
    for name, row in rows["local"].items():
        assert [rows["ray"][name][key] for key in exact] == [row[key] for key in exact]
    log = tmp_path / "ray/outputs/sweeps/tried/logs/lora.r=4.log"
    assert "adapters" in log.read_text()
    assert not list((tmp_path / "ray/outputs/sweeps/tried").glob(".seen*"))

    code, stdout, _ = swept(*grid, ON_RAY, folder=tmp_path / "ray")
    assert code == 0
    assert " -> " not in stdout
    assert stdout.count("was finished before") == 3


@pytest.mark.slow
def test_a_point_whose_worker_was_killed_is_run_again_from_its_checkpoint(tmp_path: Path) -> None:
    steps = ("curriculum.stages.main.steps=120", "trainer.max_stage_steps=120", "checkpoint.every_steps=10")
    words = (*steps, "trainer.log_every_steps=1", ON_RAY)
    point = tmp_path / "outputs/sweeps/tried/base"
    with started(*words, folder=tmp_path) as process:
        child = wait_for_step(process, point, 25)
        worker = child.parent()
        assert worker is not None
        worker.kill()
        assert psutil.wait_procs([child], timeout=20)[1] == []
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "sweep point base was lost with its node or worker (WorkerCrashedError); it is run again" in stderr
    assert rows_of(tmp_path)["base"]["status"] == "finished"
    assert steps_of(point) == list(range(1, 121))
    assert "resum" in (point.parent / "logs/base.log").read_text()


@pytest.mark.slow
def test_a_stop_saves_the_points_and_a_killed_sweep_leaves_none(tmp_path: Path) -> None:
    steps = ("curriculum.stages.main.steps=100000", "trainer.max_stage_steps=100000", "trainer.log_every_steps=1")
    words = (*steps, "lora.r=4,8,16", ON_RAY, "sweeping.points_at_once=1")
    point = tmp_path / "outputs/sweeps/tried/lora.r=4"
    with started(*words, folder=tmp_path) as process:
        wait_for_step(process, point, 0)
        process.terminate()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert "the same command resumes with lora.r=4; lora.r=8; lora.r=16" in stderr
    assert "sweeping.points_at_once=1: the 3 points run one after the other" in stderr
    assert [row["status"] for row in rows_of(tmp_path).values()] == ["stopped", "waiting", "waiting"]
    (checkpoint,) = (point / "checkpoints").iterdir()
    saved = int(checkpoint.name.removeprefix("step_"))
    assert saved > 0

    with started(*words, folder=tmp_path) as process:
        child = wait_for_step(process, point, saved)
        process.kill()
        process.wait()
        assert psutil.wait_procs([child], timeout=30)[1] == []
    assert steps_of(point)[: saved + 1] == list(range(1, saved + 2))


@pytest.mark.slow
def test_a_point_that_learns_nothing_is_pruned_on_its_node(tmp_path: Path) -> None:
    steps = ("curriculum.stages.main.steps=60", "trainer.max_stage_steps=60", "trainer.eval_every_steps=5")
    pruning = ("sweeping.prune=median", "sweeping.prune_after_points=1")
    code, _, stderr = swept(*steps, *pruning, "optim.lr=1e-3,1e-9", ON_RAY, folder=tmp_path)
    assert code == 0, stderr
    good, bad = rows_of(tmp_path).values()
    assert (good["status"], bad["status"]) == ("finished", "pruned")
    assert bad["eval_loss"] > good["eval_loss"]
    assert not (Path(bad["folder"]) / "result.json").exists()
    assert list((Path(bad["folder"]) / "checkpoints").iterdir())


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    code, _, stderr = swept("lora.r=4,8", ON_RAY, folder=tmp_path, env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert code == 2, stderr
    assert "error: sweeping.engine=ray; no cluster answers at RAY_ADDRESS=127.0.0.1:1 (" in stderr
    assert not (tmp_path / "outputs").exists()


def test_a_point_takes_the_chips_of_its_machine() -> None:
    assert resources_of(composed("hw=cpu").hw) == {"CPU": 1.0}
    v6e8 = {"CPU": 1.0, "TPU": 8.0, "accelerator_type:TPU-V6E": 0.001}
    assert resources_of(composed("hw=v6e8", "trainer.global_batch_rows=8").hw) == v6e8
    assert resources_of(composed("hw=v5e1").hw) == {"CPU": 1.0, "TPU": 1.0, "accelerator_type:TPU-V5LITEPOD": 0.001}
    assert resources_of(composed("hw.device=cuda", "hw.runtime=eager").hw) == {"CPU": 1.0, "GPU": 1.0}


def test_rays_names_of_the_chips_are_rays_own() -> None:
    import ray.util.accelerators as named

    from tpu_experiments.sweeping.engines.ray_tasks import ACCELERATOR_TYPES

    known = {value for name, value in vars(named).items() if name.startswith("GOOGLE_TPU")}
    assert set(ACCELERATOR_TYPES.values()) <= known


def test_machines_that_no_node_has_are_refused_before_ray_waits_for_them() -> None:
    hw = composed("hw=v6e8", "trainer.global_batch_rows=8").hw
    head = {"Alive": True, "Resources": {"CPU": 8.0, "memory": 1e9}}
    host = {"Alive": True, "Resources": {"CPU": 180.0, "TPU": 8.0, "accelerator_type:TPU-V6E": 1.0}}
    other = {"Alive": True, "Resources": {"CPU": 180.0, "TPU": 8.0, "accelerator_type:TPU-V5LITEPOD": 1.0}}
    assert unplaced(hw, [head, host]) is None
    said = unplaced(hw, [head, other, host | {"Alive": False}])
    assert said is not None
    assert "a node with 1 CPU, 8 TPU, accelerator_type:TPU-V6E, and no node of the cluster has that" in said
    assert "(nodes: 180 CPU, 8 TPU, accelerator_type:TPU-V5LITEPOD; 8 CPU)" in said


def test_several_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hw\.num_hosts=4 with -m"):
        RayEngine(given="gs://bkt").check(composed("hw=v5e16", "trainer.global_batch_rows=16"))


def test_a_node_without_this_checkout_or_this_folder_is_refused(tmp_path: Path) -> None:
    digest = node.code_digest(ROOT)
    assert digest is not None
    seen = tmp_path / "sweep.json"
    seen.touch()
    assert node.node_problem(ROOT, digest, str(seen), folder=ROOT) is None
    assert node.node_problem(ROOT, digest, None, folder=ROOT) is None
    unseen = str(tmp_path / "elsewhere" / "sweep.json")
    assert "on this machine's disk; set output_dir to a bucket" in str(
        node.node_problem(ROOT, digest, unseen, folder=ROOT)
    )
    assert "has no folder /nowhere" in str(node.node_problem(ROOT, digest, None, folder="/nowhere"))
    assert "copy this checkout to the same path" in str(node.node_problem(str(tmp_path), digest, None, folder=ROOT))
    (tmp_path / "run.py").write_text("")
    assert "has other code or settings" in str(node.node_problem(str(tmp_path), digest, None, folder=ROOT))
    before = node.code_digest(str(tmp_path))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/x.yaml").write_text("a: 1")
    assert node.code_digest(str(tmp_path)) != before


def test_a_point_has_the_nodes_variables_the_given_ones_and_those_of_its_chip() -> None:
    own = {"PATH": "/bin", "RAY_JOB_ID": "ff", "OMP_NUM_THREADS": "1", "HF_TOKEN": "node"}
    on_cpu = node.environment(own, given={"HF_TOKEN": "mine"}, device="cpu")
    assert on_cpu == {"PATH": "/bin", "OMP_NUM_THREADS": "1", "HF_TOKEN": "mine"}
    on_host = node.environment(own, given={}, device="tpu")
    assert on_host == {"PATH": "/bin", "HF_TOKEN": "node"}
    on_chip = node.environment({**own, "TPU_VISIBLE_CHIPS": "3"}, given={"OMP_NUM_THREADS": "4"}, device="tpu")
    assert (on_chip["TPU_PROCESS_PORT"], on_chip["TPU_PROCESS_BOUNDS"]) == ("8479", "1,1,1")
    assert on_chip["OMP_NUM_THREADS"] == "4"
    assert "TPU_PROCESS_PORT" not in node.environment({"TPU_VISIBLE_CHIPS": "0,1"}, given={}, device="tpu")
