"""The whole main job with `output_dir=gs://...`: run.py in processes of its own against the emulator of this one."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import gcsfs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import forks
from tests.benchmarks.outage import Bucket
from tests.jobs import TINY_JOB
from tests.training.runs import SAME_SUMS, finished
from tpu_experiments.metrics.goodput import PARTS
from tpu_experiments.storage import paths
from tpu_experiments.storage.lease import Lease

pytest_plugins = ("tests.gcs",)
# The eager runtime: what is tested is the storage, and two minutes of compiling for the CPU would add nothing to it.
COMMON = (
    "debug=smoke", "hw.runtime=eager", "data=sample_text", "trainer.log_every_steps=1", "checkpoint.every_steps=2",
    "sample.max_new_tokens=2",
)  # fmt: skip
NAME = "in_a_bucket"
BROUGHT = {
    "README.md", "adapter", "audit.html", "audit.json", "base", "checkpoints", "config.yaml", "identity.json", "lives",
    "metrics.jsonl", "plan.md", "provenance.json", "result.json", "run.log", "tensorboard",
}  # fmt: skip


def started(output_dir: str, *overrides: str, disk: Path | None = None) -> forks.Process:
    """run.py with the emulator's address in its environment; `disk` holds what it writes on its machine."""
    dropped = ("PJRT_DEVICE", "CPU_NUM_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in dropped} | SAME_SUMS
    if disk is not None:
        disk.mkdir(exist_ok=True)
        kept |= {"TMPDIR": str(disk), "XDG_CACHE_HOME": str(disk / "cache")}
    command = ["run.py", *TINY_JOB, *COMMON, f"name={NAME}", f"output_dir={output_dir}", *overrides]
    return forks.start(command, env=kept, stderr=subprocess.STDOUT)


def stop_after(process: forks.Process, step: int, *, before: Callable[[], object] = lambda: None) -> str:
    """Send SIGTERM when the line of this step is there; all output."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(rf"step +{step}/", line):
            before()
            process.send_signal(signal.SIGTERM)
    return "".join(seen)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The same job on the local disk, without a stop."""
    folder = tmp_path_factory.mktemp("local")
    return folder / NAME, finished(*COMMON, f"name={NAME}", output_dir=folder)


def test_interrupted_and_continued_in_a_bucket(uninterrupted, gcs_bucket):
    local, result_of_local = uninterrupted
    output_dir, run = f"{gcs_bucket}/runs", f"{gcs_bucket}/runs/{NAME}"
    with started(output_dir) as process:
        output = stop_after(process, 3)
    assert process.returncode == 75, output
    assert paths.list_names(paths.join(run, "checkpoints"))
    assert not paths.exists(paths.join(run, "result.json"))
    held = Lease(run, name=NAME, on_lost=lambda: None).acquire()  # the first has given its own back
    with started(output_dir) as process:
        output = process.communicate()[0]
    assert process.returncode == 2, output
    assert f"process {os.getpid()} on" in output
    assert "is writing this run" in output
    held.release()
    with started(output_dir) as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output

    assert set(paths.list_names(run)) == BROUGHT
    adapter = paths.read_bytes(paths.join(run, "adapter", "adapter_model.safetensors"))
    assert adapter == (local / "adapter" / "adapter_model.safetensors").read_bytes()
    result = json.loads(paths.read_text(paths.join(run, "result.json")))
    assert result["eval_loss"] == result_of_local["eval_loss"]
    account_is_whole(result["goodput"])
    tensorboard_has_every_record(run)
    no_stale_listing(run)


def killed_after(step: int, output_dir: str, events: Path, disk: Path) -> None:
    """A life that kills itself at the record of this step, once the checkpoint of the step before is complete; its
    machine's disk is gone with it."""
    marker = f"checkpoints/step_{step - 1:08d}/COMMIT.json"
    options = f"path: '{events}', kill_after: {step}, marker: {marker}"
    probe = f"+logger={{probe: {{_target_: tpu_experiments.loggers.probe.Probe, options: {{{options}}}}}}}"
    with started(output_dir, "name=lost_disk", probe, disk=disk) as process:
        output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output
    assert any(disk.rglob("metrics.jsonl"))
    shutil.rmtree(disk)


@pytest.mark.slow
def test_a_lost_disk_takes_no_record_along(gcs_bucket, tmp_path):
    """All lives together last less than `UPLOAD_SECONDS`, or hardly more."""
    output_dir, run = f"{gcs_bucket}/runs", f"{gcs_bucket}/runs/lost_disk"
    for step in (3, 5):
        killed_after(step, output_dir, tmp_path / "events", tmp_path / f"disk_{step}")
        records = [json.loads(line) for line in paths.read_text(paths.join(run, "metrics.jsonl")).splitlines()]
        assert {r["step"] for r in records if "train/loss" in r} >= set(range(1, step))
    with started(output_dir, "name=lost_disk", disk=tmp_path / "disk") as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    tensorboard_has_every_record(run, num_lives=3)


@pytest.mark.slow
def test_a_stop_while_the_bucket_is_away_is_kept_here_and_delivered(gcs_bucket, tmp_path, monkeypatch):
    """Checkpoint and records: the next life on this machine has them in the bucket before it goes on."""
    bucket = Bucket()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.address)
    gcsfs.GCSFileSystem.clear_instance_cache()
    output_dir, run = f"{gcs_bucket}/runs", f"{gcs_bucket}/runs/away"
    # Steps enough for the signal to find it at work, however busy the machine.
    given = (output_dir, "name=away", "checkpoint.grace_seconds=2", "trainer.max_stage_steps=20")
    with started(*given, disk=tmp_path / "disk") as process:
        output = stop_after(process, 3, before=lambda: setattr(bucket, "is_away", True))
    assert process.returncode == 75, output
    assert re.search(r"checkpoints wait in .*; the same command on this machine delivers them", output)
    bucket.is_away = False
    newest = max(int(file.parent.name[5:]) for file in (tmp_path / "disk").rglob("step_*/COMMIT.json"))
    for left in (tmp_path / "disk").glob("tpu_experiments_*"):
        shutil.rmtree(left)
    with started(*given, disk=tmp_path / "disk") as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    assert f"resumed at step {newest} " in output
    tensorboard_has_every_record(run, num_steps=20)
    bucket.server.stop()


def account_is_whole(goodput: dict) -> None:
    run, life = goodput["run"], goodput["life"]
    assert (run["lives"], life["lives"]) == (2, 1)
    for account in (run, life):
        assert set(account["seconds"]) == set(PARTS)
        assert sum(account["seconds"].values()) == pytest.approx(account["wall_seconds"])
        assert sum(account["shares"].values()) == pytest.approx(1.0)
        assert all(seconds >= 0 for seconds in account["seconds"].values())
    assert run["lost_steps"] == 0  # a stop on request saves first
    assert run["usd"] == {"on_demand": None, "spot": None}
    assert min(run["seconds"][part] for part in ("setup", "step", "evaluation", "save")) > 0


def tensorboard_has_every_record(run: str, *, num_lives: int = 2, num_steps: int = 6) -> None:
    """Against metrics.jsonl, value for value; one curve over both lives."""
    lines = paths.read_text(paths.join(run, "metrics.jsonl")).splitlines()
    records = [json.loads(line) for line in lines]
    folder = paths.join(run, "tensorboard")
    assert len(paths.list_names(folder)) == num_lives
    found = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0}).Reload()  # from the bucket itself
    tags = {tag for record in records for tag, value in record.items() if isinstance(value, float) and "/" in tag}
    assert {"train/loss", "eval/loss", "perf/tokens_per_second", "goodput/step_percent"} <= tags
    for tag in tags:
        expected = [(r["step"], r[tag]) for r in records if r.get(tag) is not None]
        curve = [(event.step, event.value) for event in found.Scalars(tag)]
        assert [step for step, _ in curve] == [step for step, _ in expected], tag
        assert [value for _, value in curve] == pytest.approx([value for _, value in expected], rel=1e-6), tag
    steps = [event.step for event in found.Scalars("train/loss")]
    assert steps == list(range(1, num_steps + 1))
    texts = {tag: found.Tensors(f"{tag}/text_summary") for tag in ("config", "audit", "plan")}
    assert {tag: len(shown) for tag, shown in texts.items()} == dict.fromkeys(texts, 1)
    assert len(found.Tensors("sample/text_summary")) >= 2, "before training and after it"
    assert b"supervised" in texts["audit"][0].tensor_proto.string_val[0]
    assert found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content


def no_stale_listing(run: str) -> None:
    """Another client's new file is seen by one that has listed the folder before."""
    import gcsfs

    before = paths.list_names(paths.join(run, "checkpoints"))
    other = gcsfs.GCSFileSystem(skip_instance_cache=True)
    other.pipe_file(f"{run}/checkpoints/step_99999999/COMMIT.json", b"{}")
    assert paths.list_names(paths.join(run, "checkpoints")) == [*before, "step_99999999"]
    assert paths.exists(paths.join(run, "checkpoints", "step_99999999", "COMMIT.json"))
    other.rm_file(f"{run}/checkpoints/step_99999999/COMMIT.json")
    assert paths.list_names(paths.join(run, "checkpoints")) == before
