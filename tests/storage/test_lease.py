"""One process holds a run folder; a dead one does not hold it for long, and no clock of a machine is asked."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import lease, paths
from tpu_experiments.storage.lease import Lease, Owner, hold, refuse_if_held

pytest_plugins = ("tests.gcs",)
ELSEWHERE = {"machine": "another boot/1", "host": "vm-b", "pid": 4242}


@pytest.fixture(params=["local", "memory", "gs"])
def folder(request, tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(lease, "PAUSE_SECONDS", 0.0)
    if request.param == "gs":
        return request.getfixturevalue("gcs_bucket") + "/runs/x"
    return str(tmp_path / "x") if request.param == "local" else f"memory://{tmp_path.name}/x"


def made(folder: str, **settings: float) -> Lease:
    return Lease(folder, name="x", on_lost=lambda: None, **settings)


def write(folder: str, owner: Owner) -> None:
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, lease.NAME), lease._text(owner))


def test_the_second_is_refused_and_names_the_first(folder):
    refuse_if_held(folder, name="x")
    assert paths.list_names(folder) == []
    first = made(folder).acquire()
    with pytest.raises(
        ConfigError, match=rf"name=x; process {os.getpid()} on .* is writing this run; .* wait 1[12]\d s"
    ):
        refuse_if_held(folder, name="x")
    with pytest.raises(ConfigError, match="is writing this run"):
        made(folder).acquire()
    assert paths.list_names(folder) == [lease.NAME]
    first.release()
    first.release()
    assert paths.list_names(folder) == []
    made(folder).acquire().release()


def test_one_of_another_machine_expires_by_the_clock_of_the_storage(folder, monkeypatch):
    write(folder, replace(Owner.me(), **ELSEWHERE, started="1970-01-01T00:00:00Z", pid_ticks=0))
    with monkeypatch.context() as patch:
        patch.setattr(lease.time, "time", lambda: 4e9)  # this machine's clock is a century off
        with pytest.raises(ConfigError, match=r"process 4242 on vm-b \(since 1970"):
            made(folder).acquire()
    monkeypatch.setattr(lease, "VALID_SECONDS", 0.0)
    with hold(folder, name="x", on_lost=lambda: None):
        assert lease.read(folder).pid == os.getpid()
    assert lease.read(folder) is None


def test_the_age_is_a_difference_of_the_storage_s_own_times(tmp_path):
    write(str(tmp_path), replace(Owner.me(), **ELSEWHERE))
    path = tmp_path / lease.NAME
    stat = path.stat()
    os.utime(path, (stat.st_atime, stat.st_mtime - 100))
    with pytest.raises(ConfigError, match=r"wait (19|20) s"):
        refuse_if_held(str(tmp_path), name="x")
    os.utime(path, (stat.st_atime, stat.st_mtime - 121))
    refuse_if_held(str(tmp_path), name="x")


def test_without_modification_times_the_counter_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(lease.paths, "modified_seconds", lambda path: None)
    owner = replace(Owner.me(), **ELSEWHERE)
    write(str(tmp_path), owner)
    looks = []

    def renews(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            write(str(tmp_path), replace(owner, renewals=1))

    monkeypatch.setattr(lease.time, "sleep", renews)
    with pytest.raises(ConfigError, match="vm-b"):
        refuse_if_held(str(tmp_path), name="x")
    assert len(looks) == 3
    refuse_if_held(str(tmp_path), name="x")  # nobody renews any more
    assert sum(looks[3:]) == lease.VALID_SECONDS


def test_a_dead_process_of_this_machine_is_seen_at_once(folder):
    code = (
        "import sys; from tpu_experiments.storage import lease; lease.PAUSE_SECONDS = 0\n"
        "lease.Lease(sys.argv[1], name='x', on_lost=int).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    if folder.startswith("memory"):
        pytest.skip("memory:// is of one process")
    command = [sys.executable, "-c", code, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} "):
            refuse_if_held(folder, name="x")
        process.kill()
    made(folder).acquire().release()


def test_a_number_given_to_another_process_since_is_no_owner(tmp_path):
    write(str(tmp_path), replace(Owner.me(), pid_ticks=1))
    refuse_if_held(str(tmp_path), name="x")


def test_it_is_renewed_and_a_lost_one_is_reported(folder, caplog):
    told = threading.Event()
    mine = Lease(folder, name="x", on_lost=told.set, renew_seconds=0.02).acquire()
    while (owner := lease.read(folder)) is None or owner.renewals < 2:
        pass
    write(folder, replace(Owner.me(), **ELSEWHERE))
    assert told.wait(10)
    assert mine.is_lost
    assert "taken over by process 4242 on vm-b" in caplog.text
    mine.release()
    assert lease.read(folder).pid == 4242  # another's is never removed


def test_of_two_that_begin_together_one_remains(tmp_path):
    """No precondition and no lock: the pause and the reading back decide."""
    folder = f"memory://{tmp_path.name}/race"
    results: list[str] = []

    def begin() -> None:
        try:
            made(folder).acquire()
            results.append("held")
        except ConfigError:
            results.append("refused")

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["held", "refused", "refused", "refused"]


def test_a_bucket_is_asked_to_create_and_to_remove_what_was_seen(gcs_bucket, monkeypatch):
    """Google Cloud Storage honours these; the emulator ignores them."""
    asked = []
    filesystem, _ = paths.filesystem_of(gcs_bucket)
    request = type(filesystem)._request

    async def watched(self, method, path, *args, **kwargs):
        asked.append((method, kwargs.get("ifGenerationMatch")))
        return await request(self, method, path, *args, **kwargs)

    folder = f"{gcs_bucket}/runs/x"
    write(folder, replace(Owner.me(), **ELSEWHERE))
    generation = filesystem.info(f"{folder}/{lease.NAME}")["generation"]
    monkeypatch.setattr(type(filesystem), "_request", watched)
    monkeypatch.setattr(lease, "VALID_SECONDS", 0.0)
    monkeypatch.setattr(lease, "PAUSE_SECONDS", 0.0)
    made(folder).acquire().release()
    assert ("DELETE", generation) in asked
    assert ("POST", "0") in asked


def test_what_is_no_lease_holds_nobody_up(folder, caplog):
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, lease.NAME), "{")
    made(folder).acquire().release()
    assert "is not a valid lease" in caplog.text


def test_hosts_of_one_slice_are_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    with hold(str(tmp_path), name="x", on_lost=int):
        assert list(Path(tmp_path).iterdir()) == []


def test_the_content_is_plain():
    assert set(asdict(Owner.me())) == {"id", "host", "machine", "pid", "pid_ticks", "started", "renewals"}


def test_after_a_long_stop_a_lease_that_is_gone_was_anothers(tmp_path, monkeypatch, caplog):
    """Another took it, finished the run and gave it back: this process may not write as if nothing had been."""
    told = []
    mine = Lease(str(tmp_path), name="x", on_lost=lambda: told.append(1), renew_seconds=3600).acquire()
    paths.remove_tree(mine.path)
    mine.check()
    assert lease.read(str(tmp_path)).id == mine._owner.id, "removed by accident: taken again"
    paths.remove_tree(mine.path)
    monkeypatch.setattr(lease, "VALID_SECONDS", 0.0)
    mine.check()
    assert told
    assert mine.is_lost
    assert lease.read(str(tmp_path)) is None
    assert "the same command resumes it" in caplog.text
    mine.release()


def test_a_process_that_was_stopped_looks_at_its_lease_first(tmp_path):
    told = []
    with lease.hold(str(tmp_path), name="x", on_lost=lambda: told.append(1)):
        signal.raise_signal(signal.SIGCONT)
        assert not told
        write(str(tmp_path), replace(Owner.me(), **ELSEWHERE))
        signal.raise_signal(signal.SIGCONT)
        assert told, "before the next statement"
    assert signal.getsignal(signal.SIGCONT) is signal.SIG_DFL
