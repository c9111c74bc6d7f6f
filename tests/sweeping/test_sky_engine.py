"""Points as SkyPilot's managed jobs: followed through kills, stops and outages; the files that SkyPilot is given.

`sky` is tests/sweeping/fake_sky.py on the PATH, the bucket an emulator. The real SkyPilot, where it is installed, reads
the files.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.config.composing import composed
from tests.jobs import TINY_JOB
from tests.sweeping import fake_sky
from tests.training.runs import REPOSITORY, SAME_SUMS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths
from tpu_experiments.sweeping.engines import sky_jobs
from tpu_experiments.sweeping.engines.sky_jobs import Job, SkyEngine, job_name, job_of, newest_jobs
from tpu_experiments.sweeping.points import Point, sweep_folder

pytest_plugins = ("tests.gcs",)

SWEEP = (
    "-m", *TINY_JOB, "debug=smoke", "hw=v5e1", "data=sample_text", "curriculum=single", "logger=jsonl", "name=tried",
    "sweeping.engine=sky", "sweeping.points_at_once=2",
)  # fmt: skip
GRID = "lora.r=4,8"
LONG = (
    "curriculum.stages.main.steps=100000", "trainer.max_stage_steps=100000", "trainer.log_every_steps=1",
    "checkpoint.every_steps=10",
)  # fmt: skip


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Path]:
    """The folder of a fake SkyPilot; jobs that a test leaves are killed."""
    folder = tmp_path / "cloud"
    fake_sky.install(folder)
    yield folder
    for job in fake_sky.jobs(folder):
        for pid in (job.get("controller"), job.get("pid")):
            if pid is not None and psutil.pid_exists(pid):
                psutil.Process(pid).kill()


@contextmanager
def started(*words: str, cloud: Path, bucket: str) -> Iterator["subprocess.Popen[str]"]:
    """A sweep in a process of its own; killed where a test fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    command = [sys.executable, str(REPOSITORY / "run.py"), *SWEEP, *words, f"output_dir={bucket}/runs"]
    ours = {"PATH": f"{cloud}/bin:{os.environ['PATH']}", "FAKE_SKY": str(cloud), "HF_TOKEN": "a-secret"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = kept | SAME_SUMS | ours
    with subprocess.Popen(command, cwd=REPOSITORY, env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def swept(*words: str, cloud: Path, bucket: str) -> tuple[int, str, str]:
    """Run a sweep to its end; return its exit code and what it said."""
    with started(*words, cloud=cloud, bucket=bucket) as process:
        stdout, stderr = process.communicate(timeout=400)
    return process.returncode, stdout, stderr


def rows_of(bucket: str) -> dict[str, dict[str, Any]]:
    """The rows of sweep.json by point."""
    points = json.loads(paths.read_text(f"{bucket}/runs/sweeps/tried/sweep.json"))["points"]
    return {each["name"]: each for each in points}


def launches(cloud: Path) -> int:
    """How many jobs were submitted."""
    return sum(words[:2] == ["jobs", "launch"] for words in fake_sky.calls(cloud))


def newest_step(point: str) -> int:
    """Step of the newest checkpoint."""
    return max(int(name.removeprefix("step_")) for name in paths.list_names(f"{point}/checkpoints"))


def wait_until(condition: Any, process: "subprocess.Popen[str]", *, what: str) -> None:
    """Wait for up to four minutes while the sweep runs."""
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{what}: not within 240 s"
        time.sleep(0.2)


@pytest.mark.slow
def test_jobs_outlive_the_sweep_and_the_same_command_follows_them(cloud: Path, gcs_bucket: str) -> None:
    place = {"cloud": cloud, "bucket": gcs_bucket}
    with started(GRID, **place) as process:
        running = lambda: [job["status"] for job in fake_sky.jobs(cloud)] == ["RUNNING"] * 2  # noqa: E731
        wait_until(running, process, what="two jobs that run")
        process.kill()
        process.wait()
    assert all(psutil.pid_exists(job["pid"]) for job in fake_sky.jobs(cloud))

    code, stdout, stderr = swept(GRID, **place)
    assert code == 0, stderr
    assert launches(cloud) == 2
    followed = stderr.count("which is followed") + stdout.count("was finished before")
    assert followed == 2, stderr
    folder = f"{gcs_bucket}/runs/sweeps/tried"
    rows = rows_of(gcs_bucket)
    for name in ("lora.r=4", "lora.r=8"):
        result = json.loads(paths.read_text(f"{folder}/{name}/result.json"))
        assert (rows[name]["status"], rows[name]["eval_loss"]) == ("finished", result["eval_loss"])
    assert "| lora.r |" in paths.read_text(f"{folder}/leaderboard.md")
    assert "Best: lora.r=" in stdout

    before = len(fake_sky.calls(cloud))
    code, stdout, stderr = swept(GRID, **place)
    assert (code, stdout.count("was finished before")) == (0, 2), stderr
    assert len(fake_sky.calls(cloud)) == before  # SkyPilot is not even asked


@pytest.mark.slow
def test_a_stop_cancels_the_jobs_which_save_and_an_outage_does_not(cloud: Path, gcs_bucket: str) -> None:
    place = {"cloud": cloud, "bucket": gcs_bucket}
    point = f"{gcs_bucket}/runs/sweeps/tried/lora.r=4"
    with started(*LONG, GRID, "sweeping.points_at_once=1", **place) as process:
        wait_until(lambda: paths.list_names(f"{point}/checkpoints"), process, what="a checkpoint")
        (cloud / "broken").touch()
        asked = len(fake_sky.calls(cloud))
        wait_until(lambda: len(fake_sky.calls(cloud)) > asked, process, what="a question in the outage")
        (cloud / "broken").unlink()
        assert [job["status"] for job in fake_sky.jobs(cloud)] == ["RUNNING"]
        process.terminate()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert (
        "sky jobs queue does not answer (requests.exceptions.ConnectionError: no route to host); the jobs continue"
        in stderr
    )
    assert "the same command resumes with lora.r=4; lora.r=8" in stderr
    assert [job["status"] for job in fake_sky.jobs(cloud)] == ["CANCELLED"]
    (cancel,) = [words for words in fake_sky.calls(cloud) if words[:2] == ["jobs", "cancel"]]
    assert cancel[2:6] == ["--yes", "--graceful", "--graceful-timeout", "60"]
    assert [row["status"] for row in rows_of(gcs_bucket).values()] == ["stopped", "waiting"]
    saved = newest_step(point)

    with started(*LONG, GRID, "sweeping.points_at_once=1", **place) as process:
        wait_until(lambda: newest_step(point) > saved, process, what="the next checkpoint")
    assert launches(cloud) == 2
    assert "resum" in (cloud / "jobs/2.log").read_text()


@pytest.mark.slow
def test_failures_are_reported_with_what_skypilot_says(cloud: Path, gcs_bucket: str) -> None:
    place = {"cloud": cloud, "bucket": gcs_bucket}
    code, _, stderr = swept("lora.targets=[nowhere]", **place)
    assert code == 1, stderr
    assert "ended with exit code 1 (SkyPilot's job 1 is FAILED; sky jobs logs 1); the sweep continues" in stderr
    (launch,) = [words for words in fake_sky.calls(cloud) if words[:2] == ["jobs", "launch"]]
    assert launch[4:-1] == ["--secret", "HF_TOKEN"]
    assert "a-secret" not in (cloud / "jobs/1.yaml").read_text() + json.dumps(fake_sky.calls(cloud))
    (cloud / "refused").touch()
    code, _, stderr = swept("lora.targets=[nowhere]", **place)
    assert code == 1, stderr
    assert "(sky jobs launch: sky.exceptions.NoCloudAccessError: Cloud access is not set up.)" in stderr


def test_nothing_is_started_while_the_queue_is_unknown(cloud: Path, gcs_bucket: str) -> None:
    (cloud / "broken").touch()
    code, _, stderr = swept(GRID, cloud=cloud, bucket=gcs_bucket)
    assert code == 2, stderr
    assert "error: sweeping.engine=sky; sky jobs queue does not answer (requests.exceptions.ConnectionError" in stderr
    assert launches(cloud) == 0
    assert not paths.exists(f"{gcs_bucket}/runs")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hw=v5e1", "output_dir=outputs"], "output_dir=outputs is no bucket"),
        (["hw=v5e1", "output_dir=memory://x"], "output_dir=memory://x is no bucket"),
        (["hw=cpu", "output_dir=gs://bkt/runs"], "hw=cpu is no machine that SkyPilot rents"),
        (["hw=v5e16", "output_dir=gs://bkt/runs", "trainer.global_batch_rows=16"], "hw.num_hosts=4 with -m"),
        (["hw=v5e1", "output_dir=gs://bkt/runs", "task=prepare"], "run task=prepare with sweeping.engine=local"),
    ],
)
def test_what_skypilot_cannot_run_is_refused(
    cloud: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    monkeypatch.setenv("PATH", f"{cloud}/bin:{os.environ['PATH']}")
    config = composed("sweeping.engine=sky", *overrides)
    with pytest.raises(ConfigError) as refused:
        SkyEngine(given=config.output_dir).check(config)
    assert said in str(refused.value)


def test_a_machine_without_skypilot_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no command sky on the PATH; install SkyPilot in an environment"):
        SkyEngine(given="gs://bkt/runs").check(composed("hw=v5e1", "output_dir=gs://bkt/runs"))


def point_on(hw: str, *words: str) -> Point:
    """A point of a sweep in gs://bkt/runs."""
    folder = sweep_folder("gs://bkt/runs", "tried")
    config = composed(f"hw={hw}", "trainer.global_batch_rows=8", f"output_dir={folder}", *words)
    return Point("lora.r=8,data=[a-b]", {"lora.r": "8"}, (f"hw={hw}", "lora.r=8", *words), config)


def test_a_folder_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch, cloud: Path) -> None:
    monkeypatch.setenv("PATH", f"{cloud}/bin:{os.environ['PATH']}")
    point = replace(point_on("v5e1"), options=("--config-dir=/home/me/conf",))
    with pytest.raises(ConfigError, match="--config-dir=/home/me/conf names a folder of this machine"):
        SkyEngine(given="gs://bkt/runs").open([point], folder="gs://bkt/runs/sweeps/tried", say=print)
    assert launches(cloud) == 0


RENTED = ("v5e1", "v5e4", "v5e8", "v6e1", "v6e4", "v6e8", "v4-8", "v5p-8")


@pytest.mark.parametrize("hw", RENTED)
def test_a_job_rents_the_machine_and_gives_the_points_command(hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_jobs, "OWN_SETTINGS", Path("/nowhere"))
    point = point_on(hw, "data.sample_text.path=/a b/$c")
    job = job_of(point, given="gs://bkt/runs")
    rent = point.config.hw.rent
    assert rent is not None
    assert job["resources"]["accelerators"] == f"tpu-{rent.accelerator_type}"
    assert job["resources"]["accelerator_args"] == {"runtime_version": rent.runtime_version, "tpu_vm": True}
    assert job["resources"]["use_spot"] is True
    assert job["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "envs" not in job
    assert job["secrets"] == {"HF_TOKEN": ""}
    words = shlex.split(job["run"])
    set_up = ["bash", "launch/startup.sh", f"hw={hw}", "output_dir=gs://bkt/runs"]
    assert shlex.split(job["setup"]) == words[:4] == set_up
    assert words[4:10] == ["--", "python", "run.py", f"hw={hw}", "lora.r=8", "data.sample_text.path=/a b/$c"]
    assert words[10:] == [
        'name="lora.r=8,data=[a-b]"',
        "output_dir=gs://bkt/runs/sweeps/tried",
        "hydra.mode=RUN",
    ]
    assert yaml.safe_load(yaml.safe_dump(job)) == job


def test_a_job_with_a_limit_ends_by_itself() -> None:
    words = shlex.split(job_of(point_on("v6e8"), given="gs://bkt/runs", limit_seconds=3600.5)["run"])
    assert words[:4] == ["timeout", "--kill-after=60", "3601", "bash"]


def test_settings_of_this_machine_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "default.yaml"
    own.write_text("# @package _global_\n")
    monkeypatch.setattr(sky_jobs, "OWN_SETTINGS", own)
    assert job_of(point_on("v6e8"), given="gs://bkt/runs")["file_mounts"] == {
        "~/sky_workdir/conf/local/default.yaml": str(own)
    }


def test_a_job_has_the_same_name_for_the_same_folder_alone() -> None:
    point = point_on("v5e1")
    other = Point(point.name, point.changed, point.overrides, composed("hw=v5e1", "output_dir=gs://other"))
    assert job_name(point) == job_name(point_on("v5e8"))
    assert job_name(point) != job_name(other)
    assert job_name(point).startswith("sweep-lora-r-8-data-a-b-")
    assert len(job_name(point)) <= 40


def test_the_newest_job_of_a_name_counts_and_messages_before_the_list_do_not() -> None:
    listed = [
        {"job_id": 3, "job_name": "a", "status": "RECOVERING"},
        {"job_id": 1, "job_name": "a", "status": "FAILED_SETUP"},
        {"job_id": 2, "job_name": "b", "status": "CANCELLED"},
    ]
    text = "Failed to connect to SkyPilot API server.\n[0m started\n" + json.dumps(listed, indent=2)
    found = newest_jobs(text)
    assert found == {"a": Job(3, "RECOVERING"), "b": Job(2, "CANCELLED")}
    assert [found[name].is_alive for name in "ab"] == [True, False]
    assert not any(Job(1, status).is_alive for status in ("SUCCEEDED", "FAILED", "FAILED_NO_RESOURCE"))
    assert newest_jobs("[]") == {}
    with pytest.raises(ValueError, match="no JSON list"):
        newest_jobs("No managed jobs")


PARSE = """
import json, sys, sky
for file in sys.argv[1:]:
    task = sky.Task.from_yaml(file)
    (resources,) = task.resources
    print(json.dumps([task.name, resources.accelerators, resources.accelerator_args, resources.use_spot]))
"""


def test_the_real_skypilot_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sky = shutil.which("sky")
    if sky is None:
        pytest.skip("SkyPilot (sky) is not installed: an outside tool, in no extra")
    own = tmp_path / "default.yaml"
    own.write_text("# @package _global_\n")
    monkeypatch.setattr(sky_jobs, "OWN_SETTINGS", own)
    files = []
    for hw in RENTED:
        files.append(tmp_path / f"{hw}.yaml")
        files[-1].write_text(yaml.safe_dump(job_of(point_on(hw), given="gs://bkt/runs"), sort_keys=False))
    for shipped in sorted((REPOSITORY / "launch/sky").glob("*.yaml")):
        files.append(tmp_path / f"shipped_{shipped.name}")
        files[-1].write_text(shipped.read_text().replace("BUCKET: null", "BUCKET: gs://bkt/runs"))
    python = Path(sky).resolve().parent / "python"
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [str(python), "-c", PARSE, *map(str, files)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(read) == len(files)
    for hw, (_, accelerators, arguments, is_spot) in zip(RENTED, read, strict=False):
        rent = composed(f"hw={hw}", "trainer.global_batch_rows=8").hw.rent
        assert rent is not None
        assert accelerators == {f"tpu-{rent.accelerator_type}": 1}
        assert arguments == {"runtime_version": rent.runtime_version, "tpu_vm": True}
        assert is_spot is True
