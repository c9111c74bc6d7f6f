"""Temporary files of killed processes go when a run is taken and when it ends; those of living writers stay.

The writers are processes that stand still in the middle of a file.
"""

import subprocess
import sys
from contextlib import contextmanager

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import lease, paths
from tpu_experiments.storage.lease import Owner, hold, refuse_if_held

pytest_plugins = ("tests.gcs",)
WRITER = """
import sys, time
from tpu_experiments.storage import paths

def chunks():
    yield memoryview(b"half")
    print("in the middle", flush=True)
    time.sleep(600)

paths.make_dirs(sys.argv[1].rpartition("/")[0])
paths.write_chunks_atomic(sys.argv[1], chunks())
"""


@contextmanager
def writer(path: str):
    """A process that has written half of a file; it is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "in the middle\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_resumed_run_keeps_only_what_somebody_is_still_writing(tmp_path):
    run = tmp_path / "mine"
    for name in ("adapter/adapter_model.safetensors", "lives/0001_ab.json", "result.json"):
        with writer(f"{run}/{name}"):
            pass
    with writer(f"{tmp_path}/other/result.json"):
        pass
    (run / ".kept.tmp").write_text("not a name of ours")
    (run / "link").symlink_to(tmp_path / "other")
    with writer(f"{run}/test_results.json"), hold(str(run), name="mine", on_lost=lambda: None):
        left = sorted(path.name for path in run.rglob(".*.tmp"))
        assert [name.partition(".json")[0] for name in left] == [".kept.tmp", ".test_results"]
        assert list(run.rglob("*.safetensors*")) == []
    assert len(list(run.rglob(".*.tmp"))) == 2, "it was being written when the run ended"
    with hold(str(run), name="mine", on_lost=lambda: None):
        pass
    assert [path.name for path in run.rglob(".*")] == [".kept.tmp"]
    assert len(list((tmp_path / "other").iterdir())) == 1, "another run's"


def test_what_is_killed_while_the_run_lives_goes_at_its_end(tmp_path):
    with hold(str(tmp_path), name="mine", on_lost=lambda: None), writer(f"{tmp_path}/export/card.md"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["export"]


@pytest.mark.parametrize("place", ["local", "memory", "gs"])
def test_files_for_the_storage_s_time_go_too(request, tmp_path, monkeypatch, place):
    monkeypatch.setattr(lease, "PAUSE_SECONDS", 0.0)
    folder = {"local": f"{tmp_path}/x", "memory": f"memory://{tmp_path.name}/x", "gs": None}[place]
    folder = folder or request.getfixturevalue("gcs_bucket") + "/runs/leftovers"
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, ".time-0123abcd"), "")
    with hold(folder, name="x", on_lost=lambda: None):
        assert paths.list_names(folder) == [lease.NAME]
        paths.write_text_atomic(paths.join(folder, ".time-4567abcd"), "")
    assert paths.list_names(folder) == []


def test_a_probe_that_the_holder_removes_is_no_expired_lease(tmp_path, monkeypatch):
    """Otherwise the process that asked would take a run that lives."""
    owner = Owner("id", "vm-b", "another boot/1", 4242, 0, "2026-01-01T00:00:00Z")
    paths.write_text_atomic(str(tmp_path / lease.NAME), lease._text(owner))
    real = paths.modified_seconds

    def removed(path: str) -> float | None:
        lease._remove_leftovers(str(tmp_path))
        return real(path)

    monkeypatch.setattr(lease.paths, "modified_seconds", removed)
    with pytest.raises(ConfigError, match="process 4242 on vm-b"):
        refuse_if_held(str(tmp_path), name="x")
