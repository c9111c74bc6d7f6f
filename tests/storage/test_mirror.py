"""A growing file or folder reaches its remote place, whole, and never blocks its writer."""

import threading
import uuid
from pathlib import Path

import pytest

from tpu_experiments.storage import paths, spool
from tpu_experiments.storage.spool import Mirror


@pytest.fixture
def remote() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def test_a_local_place_is_written_directly(tmp_path: Path) -> None:
    place = Mirror.of_file(str(tmp_path / "x.log"))
    assert place.local == tmp_path / "x.log"
    place.local.write_text("a")
    place.upload_if_due()
    place.close()
    assert (tmp_path / "x.log").read_text() == "a"
    assert paths.list_names(str(tmp_path)) == ["x.log"]


def test_a_remote_file_continues_and_arrives_at_close(remote: str) -> None:
    paths.write_text_atomic(f"{remote}/x.log", "first\n")
    place = Mirror.of_file(f"{remote}/x.log")
    with place.local.open("a") as file:
        file.write("second\n")
    place.upload_if_due()  # not due yet
    assert paths.read_text(f"{remote}/x.log") == "first\n"
    place.close()
    place.close()
    assert paths.read_text(f"{remote}/x.log") == "first\nsecond\n"
    assert not place.local.exists()


def test_a_remote_folder_keeps_the_files_of_earlier_processes(remote: str) -> None:
    paths.write_text_atomic(f"{remote}/events.1", "1")
    place = Mirror.of_folder(remote)
    (place.local / "events.2").write_text("2")
    (place.local / "media").mkdir()
    (place.local / "media" / "m").write_text("m")
    place.close()
    assert paths.list_names(remote) == ["events.1", "events.2", "media"]
    assert paths.read_text(f"{remote}/media/m") == "m"


def test_an_upload_runs_beside_the_writer(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "UPLOAD_SECONDS", 0.0)
    started, go_on = threading.Event(), threading.Event()
    write = paths.write_bytes_atomic
    calls = []

    def slow(path: str, data: bytes) -> None:
        calls.append(data)
        started.set()
        assert go_on.wait(10)
        write(path, data)

    monkeypatch.setattr(paths, "write_bytes_atomic", slow)
    place = Mirror.of_file(f"{remote}/x")
    place.local.write_text("a")
    place.upload_if_due()
    assert started.wait(10)
    place.upload_if_due()  # one at a time
    place.local.write_text("ab")
    go_on.set()
    place.close()
    assert calls == [b"a", b"ab"]
    assert paths.read_text(f"{remote}/x") == "ab"


def test_a_failed_upload_is_repeated(
    remote: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "UPLOAD_SECONDS", 0.0)
    place = Mirror.of_file(f"{remote}/x")
    place.local.write_text("a")
    with monkeypatch.context() as patch:
        patch.setattr(paths, "write_bytes_atomic", _refuse)
        place.upload_if_due()
        assert place._thread is not None
        place._thread.join()
    assert "failed and will be retried: OSError: 503" in caplog.text
    place.close()
    assert paths.read_text(f"{remote}/x") == "a"


def test_the_last_upload_raises_and_keeps_the_data(
    remote: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Mirror.of_file(f"{remote}/x")
    place.local.write_text("precious")
    monkeypatch.setattr(paths, "write_bytes_atomic", _refuse)
    with pytest.raises(OSError, match="503"):
        place.close()
    kept = Path(caplog.messages[-1].rpartition(" ")[2])
    assert kept.read_text() == "precious"
    kept.unlink()
    kept.parent.rmdir()


def test_an_upload_on_demand_is_there_when_it_returns_and_never_older(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "UPLOAD_SECONDS", 0.0)
    place = Mirror.of_file(f"{remote}/x")
    place.local.write_text("a")
    place.upload()
    assert paths.read_text(f"{remote}/x") == "a"
    started, go_on = threading.Event(), threading.Event()
    write = paths.write_bytes_atomic

    def slow(path: str, data: bytes) -> None:
        started.set()
        assert go_on.wait(10)
        write(path, data)

    monkeypatch.setattr(paths, "write_bytes_atomic", slow)
    place.local.write_text("aa")
    place.upload_if_due()  # this one has read the file before it grew
    assert started.wait(10)
    place.local.write_text("aab")
    demanded = threading.Thread(target=place.upload)
    demanded.start()
    go_on.set()
    demanded.join()
    assert paths.read_text(f"{remote}/x") == "aab"
    place.local.write_text("aabb")
    monkeypatch.setattr(paths, "write_bytes_atomic", _refuse)
    with pytest.raises(OSError, match="503"):
        place.upload()
    monkeypatch.undo()
    place.close()
    place.upload()  # nothing is left to bring


def _refuse(path: str, data: bytes) -> None:
    raise OSError("503")
