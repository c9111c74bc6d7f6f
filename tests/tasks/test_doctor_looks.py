"""task=doctor: what it sees of this machine, of an emulated bucket, and of processes that hold something."""

import fcntl
import json
import os
import subprocess
import sys

import gcsfs
import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.runtime.processes import chips
from tpu_experiments.storage import lease
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.tasks.doctor import cloud, devices, places, sources
from tpu_experiments.tasks.doctor.places import inspect_model_files

pytest_plugins = ("tests.gcs",)
HOLD = "import sys, time; file = open(sys.argv[1]); print('open', flush=True); time.sleep(100)"


@pytest.fixture
def holder(tmp_path):
    """A process that has a file open, as one has a chip's node."""
    (tmp_path / "accel0").touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "accel0")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_who_holds_a_node(tmp_path, holder, monkeypatch):
    (tmp_path / "vfio").mkdir()
    for name in ("0", "12", "vfio"):
        (tmp_path / "vfio" / name).touch()
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-1")
    nodes = chips.device_nodes(tmp_path)
    assert [os.path.relpath(node, tmp_path) for node in nodes] == ["accel0", "vfio/0", "vfio/12"]
    found, _ = chips.holders_of(nodes)
    assert [(each.pid, each.node) for each in found] == [(holder.pid, nodes[0])]
    assert found[0].command == f"{sys.executable} -c"  # arguments may be secrets


def test_who_has_locked_a_file(tmp_path):
    path = tmp_path / "libtpu_lockfile"
    assert not chips.inspect_lock_file(path).is_there
    with path.open("w") as file:
        assert chips.inspect_lock_file(path).holder is None
        fcntl.flock(file, fcntl.LOCK_EX)
        seen = chips.inspect_lock_file(path)
    assert (seen.is_there, seen.owner, seen.is_writable, seen.holder) == (True, os.geteuid(), True, os.getpid())


LOOK = (
    "from pathlib import Path; from tpu_experiments.tasks.doctor.devices import inspect_memlock;"
    "from tpu_experiments.runtime.processes.env import raise_memlock; import resource;"
    "lock = resource.RLIMIT_MEMLOCK; resource.setrlimit(lock, (65536, 131072)); raise_memlock();"
    "print(inspect_memlock(Path('status')), resource.getrlimit(lock))"
)


def test_the_limit_of_locked_memory_and_who_passes_it(tmp_path):
    """In a child that lowers its own limit; a run raises it as far as its rights go."""
    dropped = "setpriv --inh-caps=-all --bounding-set=-all --reuid=65534 --clear-groups" if os.geteuid() == 0 else ""
    command = [*dropped.split(), sys.executable, "-c", LOOK]
    for rights, is_exempt in (("0", False), ("4000", True), ("1000000", True)):
        (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{rights:0>16}\n")
        env = os.environ | {"PYTHONPATH": str(devices.REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
        tmp_path.chmod(0o755)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seen = devices.Memlock(131072, is_exempt)
        assert done.stdout.strip() == f"{seen} (131072, 131072)"


def test_devices_start_in_a_child(make_config):
    config = make_config("hw.parallel=spmd", "hw.num_devices=2")
    seen = devices.inspect_devices(config, DoctorTaskConfig("doctor", device_timeout_seconds=120))
    assert seen.probed is not None
    assert (seen.probed.num_devices, seen.probed.kind, seen.probed.total) == (2, "CPU", 2.0)
    assert devices.judge_devices(seen, config).verdict == "ok"


def test_a_child_that_takes_too_long_or_fails_is_said(make_config):
    assert "did not start within 0 s" in devices.probe(make_config().hw, timeout_seconds=0.01).error
    no_cuda = make_config("hw.runtime=eager", "hw.device=cuda").hw
    assert devices.probe(no_cuda, timeout_seconds=120).error


def test_a_bucket_overwrites_where_a_disk_adds(make_config, gcs_bucket, tmp_path):
    there = places.inspect_output_dir(make_config(f"output_dir={gcs_bucket}/runs"))
    assert (there.place, there.append, there.complaint) == (f"{gcs_bucket}/runs", "overwrites", None)
    assert gcsfs.GCSFileSystem().find("bkt") == []
    here = places.inspect_output_dir(make_config(f"output_dir={tmp_path}/not/there"))
    assert (here.place, here.append, here.complaint) == (str(tmp_path), "adds", None)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_refuses(make_config, tmp_path):
    (tmp_path / "file").touch()
    config = make_config("output_dir=/proc/runs")
    seen = places.inspect_output_dir(config)
    assert seen.complaint is not None
    assert places.judge_output_dir(seen, config).verdict == "failed"


def test_a_place_that_takes_no_file_is_ok_for_no_check(make_config, tmp_path, monkeypatch):
    """Root may write to /proc, says os.access, and cannot."""
    cache = "hw.compile_cache=/proc/nope/compile_cache"
    config = make_config("experiment=mistral7b_ro", "output_dir=/proc/nope", cache, "name=x")
    for inspect, judge in (
        (places.inspect_compile_cache, places.judge_compile_cache),
        (places.inspect_disk, places.judge_disk),
        (places.inspect_output_dir, places.judge_output_dir),
        (places.inspect_run, places.judge_run),
    ):
        assert judge(inspect(config), config).verdict == "failed", inspect.__name__
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/proc/hub")
    here = make_config("experiment=mistral7b_ro", f"output_dir={tmp_path}", "name=x")
    finding = places.judge_disk(places.inspect_disk(here), here)
    assert (finding.verdict, finding.seen.split(" takes")[0]) == ("failed", "the download: /proc")
    assert places.judge_compile_cache(places.inspect_compile_cache(here), here).verdict == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_dies_says_of_what(make_config, tmp_path, monkeypatch):
    """libtpu prints the cause, then a stack trace, and aborts."""
    dying = tmp_path / "python"
    dying.write_text(
        "#!/bin/sh\necho 'WARNING: Logging before InitGoogle()' >&2\n"
        "echo 'F0000 tpu.cc:1] Check failed: ports > 0' >&2\necho '    @ 0x7f (unknown)' >&2\nkill -ABRT $$\n"
    )
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    found = devices.probe(make_config("experiment=mistral7b_ro").hw, timeout_seconds=60)
    assert found.error == "their process died of SIGABRT: F0000 tpu.cc:1] Check failed: ports > 0"


def test_the_run_folder(make_config, tmp_path):
    config = make_config("task=doctor", f"output_dir={tmp_path}")
    assert places.judge_run(places.inspect_run(config), config).seen.endswith("is new")
    folder = open_run(places.as_training(config))
    folder.create(places.as_training(config))
    assert places.judge_run(places.inspect_run(config), config).seen.endswith("resumes")
    with lease.hold(folder.path(), name=folder.name, on_lost=lambda: None):
        assert f"process {os.getpid()} on" in places.judge_run(places.inspect_run(config), config).seen
    other = make_config("task=doctor", f"output_dir={tmp_path}", "lora.r=4")
    assert "was made with lora.r=16, now 4" in places.judge_run(places.inspect_run(other), other).seen
    with open(folder.path("result.json"), "w") as file:
        json.dump({"status": "finished"}, file)
    assert places.judge_run(places.inspect_run(config), config).verdict == "warning"


def test_several_hosts_need_a_place_that_all_see(make_config):
    for place, verdict in (("outputs", "warning"), ("gs://bkt/runs", "ok")):
        config = make_config("task=doctor", "experiment=mistral7b_ro", "hw=v6e16", f"output_dir={place}")
        finding = places.judge_settings(places.inspect_settings(config), config)
        assert finding.verdict == verdict
        assert verdict == "ok" or "output_dir=outputs is a folder of this machine, and hw.num_hosts=4" in finding.seen


def test_a_checkpoint_with_a_file_missing(make_config, tmp_path):
    config = make_config(f"model.path={tmp_path}")
    assert not inspect_model_files(config).is_complete
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (tmp_path / "1.safetensors").touch()
    assert not inspect_model_files(config).is_complete
    (tmp_path / "2.safetensors").touch()
    assert inspect_model_files(config).is_complete


def test_what_this_repository_ships_is_there(make_config):
    task = DoctorTaskConfig("doctor")

    def data(*overrides):
        config = make_config(*overrides)
        return sources.judge_data(sources.inspect_data(config, task), config)

    assert data().verdict == "ok"
    assert data("data=sample_text", "data.sample_text.path=/nowhere/x.jsonl").verdict == "failed"
    assert data("data=uk_law").verdict == "not checked"  # HF_HUB_OFFLINE of tests
    gone = data("data=sample_text", "data.sample_text.eval_path=held/out")
    assert gone.verdict == "failed"
    assert "data.sample_text.eval_path=held/out is not there" in gone.seen
    assert sources.judge_model(sources.inspect_model(make_config(), task), make_config()).verdict == "ok"


def test_gcloud_without_an_account(make_config, tmp_path, monkeypatch):
    gcloud = tmp_path / "gcloud"
    gcloud.write_text('#!/bin/sh\n[ "$1 $2" = "config list" ] && echo "{}" || exit 1\n')
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config, task = make_config("experiment=mistral7b_ro"), DoctorTaskConfig("doctor", timeout_seconds=5)
    assert cloud.inspect_gcloud(config, task) == cloud.Gcloud(True)
    gcloud.write_text('#!/bin/sh\n[ "$1" = config ] && echo \'{"core":{"account":"a","project":"p"}}\' && exit\n'
                      'echo "ERROR: (gcloud.beta) no permission" >&2; exit 1\n')  # fmt: skip
    assert cloud.inspect_gcloud(config, task) == cloud.Gcloud(
        True, "a", "p", complaint="ERROR: (gcloud.beta) no permission"
    )
    gcloud.write_text(
        '#!/bin/sh\n[ "$1" = config ] && echo \'{"core":{"account":"a","project":"p"}}\' && exit\nexec sleep 9\n'
    )
    slow = cloud.inspect_gcloud(config, DoctorTaskConfig("doctor", timeout_seconds=0.5))
    assert slow.complaint == "gcloud did not answer within 0 s"


def test_settings_of_the_doctor_are_checked(make_config):
    with pytest.raises(ConfigError, match=r"task.checks has 'devcs'; there is no such check. Did you mean 'devices'"):
        make_config("task=doctor", "task.checks=[devcs]")
    with pytest.raises(ConfigError, match=r"task.json=report; it does not end in .json"):
        make_config("task=doctor", "task.json=report")
