"""Checkpoints of an outage are kept on the local disk and arrive, newest first; a full disk is told and lived with."""

import contextlib
import errno
import logging
import os
from pathlib import Path

import pytest

from tests import faulty
from tests.faulty import FaultyFileSystem
from tpu_experiments.storage import paths, retry, spool
from tpu_experiments.storage.retry import StorageFailed
from tpu_experiments.storage.spool import Spool, key_of

TARGET = "faulty://bkt/runs/x/checkpoints"
MARKER = "COMMIT.json"


@pytest.fixture(autouse=True)
def storage(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "WAITS_SECONDS", (0.0,))
    monkeypatch.setattr(spool, "FIRST_WAIT_SECONDS", 3600.0)  # the tests deliver by hand
    faulty.wipe()
    yield
    faulty.wipe()


def writer(step: int, *, fail: Exception | None = None, on: str = TARGET):
    """Writes a small checkpoint; raises `fail` after its first file where the folder is `on`."""

    def write(folder: str) -> str:
        place = paths.join(folder, f"step_{step:08d}")
        paths.make_dirs(place)
        paths.write_text_atomic(paths.join(place, "a.safetensors"), f"tensors of {step}")
        if fail is not None and folder == on:
            raise fail
        paths.write_text_atomic(paths.join(place, MARKER), f"{step}")
        return folder

    return write


def arrived() -> list[int]:
    """Steps of the complete checkpoints at the target."""
    names = [name for name in paths.list_names(TARGET) if paths.exists(paths.join(TARGET, name, MARKER))]
    for name in names:
        assert paths.read_text(paths.join(TARGET, name, "a.safetensors")) == f"tensors of {int(name[5:])}"
    return [int(name[5:]) for name in names]


def made() -> Spool:
    return Spool(TARGET, key="x", marker=MARKER)


def test_without_an_outage_it_is_not_there(tmp_path):
    place = made()
    assert place.save(writer(2)) == TARGET
    place.close()
    assert arrived() == [2]
    assert not (tmp_path / "cache").exists()


def test_an_outage_is_reported_once_and_what_it_kept_arrives_newest_first(monkeypatch, caplog):
    place = made()
    place.save(writer(2))
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    assert place.save(writer(4)) == str(place.local)
    assert place.save(writer(6)) == str(place.local)
    assert place.is_unreachable
    with pytest.raises(ConnectionError):
        place.deliver()
    assert caplog.text.count("storage does not answer") == 1
    assert f"checkpoints are spilled to {place.local}" in caplog.text
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    order = []
    copy = paths.copy_file
    monkeypatch.setattr(paths, "copy_file", lambda source, to: (order.append(to), copy(source, to)))
    assert place.deliver() == 2
    assert arrived() == [2, 4, 6]
    assert [Path(to).parent.name[5:] + Path(to).suffix for to in order] == [
        "00000006.safetensors", "00000006.json", "00000004.safetensors", "00000004.json"
    ]  # fmt: skip
    assert "2 checkpoints uploaded" in caplog.text
    assert not place.is_unreachable
    assert not place.local.exists()
    assert place.save(writer(8)) == TARGET
    place.close()


def test_the_thread_delivers_as_soon_as_the_bucket_is_back(monkeypatch):
    monkeypatch.setattr(spool, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(spool, "LONGEST_WAIT_SECONDS", 0.02)
    place = made()
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    place.save(writer(4))
    place.save(writer(6))
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    assert place._thread is not None
    place._thread.join(30)
    assert arrived() == [4, 6]
    place.close()


def test_what_is_saved_while_it_delivers_arrives_too(monkeypatch):
    place = made()
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    place.save(writer(4))
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    copy, saved = paths.copy_file, []

    def copy_while_saving(source: str, to: str) -> None:
        if not saved:
            saved.append(place.save(writer(6)))
        copy(source, to)

    monkeypatch.setattr(paths, "copy_file", copy_while_saving)
    assert place.deliver() == 2
    assert saved == [str(place.local)]
    assert arrived() == [4, 6]
    assert not place.is_unreachable


def test_the_next_life_delivers_what_a_killed_one_left(monkeypatch):
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    first = made()
    first.save(writer(4))
    first._closed.set()
    (first.local / "step_00000006").mkdir()  # killed while it wrote this one
    (first.local / "step_00000006" / "a.safetensors").write_text("tor")
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    second = made()
    assert second.deliver() == 1
    assert arrived() == [4]
    assert not second.local.exists()


def test_at_the_end_of_a_run_what_cannot_be_delivered_is_named(monkeypatch):
    place = made()
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    place.save(writer(4))
    with pytest.raises(StorageFailed, match=r"does not answer.* 1 checkpoints wait in .*x, the newest step_00000004; "):
        place.close()
    place.close()


@pytest.mark.parametrize("fault", ["fails", "answer_lost", "refused", "dies"])
def test_every_operation_of_a_delivery_goes_wrong_once(fault, monkeypatch):
    def kept() -> Spool:
        faulty.wipe()
        made().save(writer(2))
        place = made()
        monkeypatch.setattr(FaultyFileSystem, "down", True)
        place.save(writer(4))
        place._closed.set()
        monkeypatch.setattr(FaultyFileSystem, "down", False)
        return place

    place = kept()
    with faulty.going_wrong(None, -1) as kind:
        place.deliver()
        total = kind.count
    assert total == 3
    for n in range(total):
        place = kept()
        with faulty.going_wrong(fault, n), contextlib.suppress(OSError, faulty.Died):
            place.deliver()
        assert arrived() in ([2], [2, 4]), f"operation {n}"
        made().deliver()
        assert arrived() == [2, 4], f"operation {n}"


def test_an_expired_login_is_an_outage_with_a_remedy(caplog):
    from google.auth.exceptions import RefreshError

    place = made()
    assert place.save(writer(2, fail=RefreshError("invalid_grant"))) == str(place.local)
    assert "gcloud auth application-default login" in caplog.text
    assert place.deliver() == 1
    assert arrived() == [2]


def test_a_local_disk_that_refuses_for_good_is_no_outage(tmp_path):
    place = Spool(str(tmp_path / "checkpoints"), key="x", marker=MARKER)
    with pytest.raises(NotADirectoryError):
        place.save(writer(2, fail=NotADirectoryError(errno.ENOTDIR, "Not a directory"), on=place.target))
    lost = OSError(errno.ENOTCONN, "Transport endpoint is not connected")  # a mounted bucket or Google Drive
    assert place.save(writer(2, fail=lost, on=place.target)) == str(place.local)
    assert place.deliver() == 1
    assert (tmp_path / "checkpoints" / "step_00000002" / MARKER).exists()


def test_a_bug_is_no_outage():
    with pytest.raises(TypeError):
        made().save(writer(2, fail=TypeError("a bug")))


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_makes_room_and_tries_again(caplog):
    place, rooms = made(), []
    place.save(writer(1))
    paths.write_text_atomic(f"{TARGET}/step_00000009/a.safetensors", "an earlier life was killed in it")
    writes = iter([FULL, None])
    assert place.save(lambda f: writer(2, fail=next(writes))(f), free_space=lambda: rooms.append(1)) == TARGET
    assert rooms == [1]
    assert paths.list_names(TARGET) == ["step_00000001", "step_00000002"]
    assert "removing checkpoints that retention does not keep" in caplog.text


def test_a_disk_that_stays_full_costs_checkpoints_and_ends_the_run_after_ten(tmp_path, caplog):
    place = Spool(str(tmp_path / "checkpoints"), key="x", marker=MARKER)
    with caplog.at_level(logging.WARNING):
        for step in range(1, spool.LIMIT):
            assert place.save(writer(step, fail=FULL, on=place.target), free_space=lambda: None) is None
    assert "the disk is full; free some space" in caplog.text
    assert "MiB free" in caplog.text
    assert "stops after 10 in a row" in caplog.text
    with pytest.raises(StorageFailed, match="stopped after 10 in a row"):
        place.save(writer(99, fail=FULL, on=place.target))
    assert place.save(writer(100)) == place.target


def test_a_run_made_anew_under_the_same_name_has_a_spool_of_its_own(tmp_path):
    identity = tmp_path / "identity.json"
    identity.write_text("1")
    first = key_of(str(tmp_path), identity=str(identity))
    assert key_of(str(tmp_path), identity=str(identity)) == first
    os.utime(identity, (1, 1))
    assert key_of(str(tmp_path), identity=str(identity)) != first
