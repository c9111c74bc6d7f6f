"""After a request to stop storage is waited for as long as there is time, and no longer."""

import threading
import time

import pytest

from tests import faulty
from tests.faulty import FaultyFileSystem
from tpu_experiments.storage import paths, retry, spool
from tpu_experiments.storage.retry import (
    Grace,
    StorageFailed,
    kind_of,
    pause,
    until_deadline,
    with_retries,
    with_substitute,
)
from tpu_experiments.storage.spool import Spool

LONG = 3600.0
PLACE = "faulty://bkt/x"


class Asked:
    """Whether there was a request to stop, and when."""

    at: float | None = None

    def __call__(self) -> float | None:
        return self.at

    def before(self, seconds: float) -> None:
        self.at = time.monotonic() - seconds


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(retry, "_grace", None)
    monkeypatch.setattr(retry, "POLL_SECONDS", 0.005)
    return Asked()


@pytest.fixture
def hanging():
    """A call that never ends while the test lasts."""
    ended = threading.Event()
    yield lambda: ended.wait(60)
    ended.set()


def test_without_a_request_everything_is_waited_for(asked):
    Grace(1.0, requested_at=asked).install().only_uploads_remain()
    assert until_deadline(lambda: 3) == 3
    with pytest.raises(KeyError):
        until_deadline(lambda: {}["a"])
    assert pause(0.02)


def test_a_request_cuts_nothing_while_the_work_continues(asked):
    Grace(1.0, requested_at=asked).install()
    asked.before(LONG)
    assert until_deadline(lambda: 3) == 3
    assert pause(0.02)


def test_what_hangs_is_left_behind_when_the_time_is_over(asked, hanging, monkeypatch):
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.05)
    end = Grace(0.1, requested_at=asked).install()
    asked.before(0.05)
    end.only_uploads_remain()
    with pytest.raises(TimeoutError) as error:
        until_deadline(hanging)
    assert kind_of(error.value) == "transient"
    began = []
    with pytest.raises(TimeoutError, match="not tried"):
        until_deadline(lambda: began.append(1))
    assert not began


def test_after_a_long_step_there_is_some_time_all_the_same(asked):
    end = Grace(10.0, requested_at=asked).install()
    asked.before(LONG)
    end.only_uploads_remain()
    assert until_deadline(lambda: 3) == 3


def test_what_has_a_substitute_is_cut_while_the_work_continues(asked, hanging):
    Grace(LONG, requested_at=asked).install()
    asked.before(retry.PATIENCE_SECONDS - 0.02)
    with with_substitute(), pytest.raises(TimeoutError):
        until_deadline(hanging)
    assert until_deadline(lambda: 3) == 3


def test_no_other_try_begins_without_time(asked):
    end = Grace(1.0, requested_at=asked).install()
    tries = []

    def fails() -> None:
        tries.append(1)
        end.only_uploads_remain()
        end._leaving_at -= LONG
        asked.before(LONG)
        raise ConnectionError("reset")

    with pytest.raises(ConnectionError):
        with_retries(fails, place=PLACE, operation="read")
    assert len(tries) == 1


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(spool, "FIRST_WAIT_SECONDS", LONG)
    faulty.wipe()
    yield Spool(f"{PLACE}/checkpoints", key="x", marker="COMMIT.json")
    faulty.wipe()


def write(folder: str) -> str:
    there = paths.join(folder, "step_00000002")
    paths.make_dirs(there)
    paths.write_text_atomic(paths.join(there, "COMMIT.json"), "2")
    return folder


def test_the_last_save_is_here_first_and_then_there(place, caplog):
    assert place.save(write, first="spool") == str(place.local)
    assert paths.list_names(place.target) == []
    place.close()
    assert paths.list_names(place.target) == ["step_00000002"]
    assert not place.local.exists()
    assert "storage does not answer" not in caplog.text


def test_a_local_place_has_no_detour(tmp_path):
    place = Spool(str(tmp_path), key="x", marker="COMMIT.json")
    assert place.save(write, first="spool") == str(tmp_path)


def test_where_there_is_no_room_here_it_goes_there(place, monkeypatch, caplog):
    def full(folder: str) -> str:
        if folder == str(place.local):
            raise OSError(28, "No space left on device")
        return write(folder)

    assert place.save(full, first="spool") == place.target
    assert "No space left on device" in caplog.text
    place.close()
    assert paths.list_names(place.target) == ["step_00000002"]


def test_a_save_under_way_is_cut_and_made_here(asked, place, hanging, monkeypatch):
    """The bucket hangs in the middle of a save in the background, then the process is asked to stop."""
    Grace(0.2, requested_at=asked).install()
    monkeypatch.setattr(FaultyFileSystem, "pipe_file", lambda *args, **kwargs: hanging())
    saved = []
    thread = threading.Thread(target=lambda: saved.append(place.save(write)))
    thread.start()
    asked.before(0.0)
    thread.join()
    assert saved == [str(place.local)]
    retry._grace.only_uploads_remain()
    retry._grace._leaving_at -= LONG
    asked.before(LONG)
    with pytest.raises(StorageFailed, match="1 checkpoints wait in"):
        place.close()
