"""Records of an outage: in the place before the checkpoint that needs them, kept until then, never over newer ones."""

import logging

import pytest

from tests import faulty
from tests.faulty import FaultyFileSystem
from tests.storage.test_spool import MARKER, TARGET, made, writer
from tpu_experiments.storage import paths, retry, spool
from tpu_experiments.storage.retry import StorageFailed
from tpu_experiments.storage.spool import Mirror, Spool


@pytest.fixture(autouse=True)
def storage(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "WAITS_SECONDS", (0.0,))
    monkeypatch.setattr(spool, "FIRST_WAIT_SECONDS", 3600.0)  # the tests deliver by hand
    faulty.wipe()
    yield
    faulty.wipe()


RUN = TARGET.rpartition("/")[0]


@pytest.fixture
def records(monkeypatch):
    """metrics.jsonl of the run, open, and the spool that keeps what cannot be uploaded of it."""
    monkeypatch.setattr(spool, "_spill_folders", {})
    monkeypatch.setattr(spool, "_open", [])
    place = made()
    spool.set_spill_folder(place.records, run=RUN)
    paths.write_text_atomic(f"{RUN}/metrics.jsonl", "1\n")
    open_one = Mirror.of_file(f"{RUN}/metrics.jsonl")
    other = Mirror.of_file("faulty://bkt/runs/other/metrics.jsonl")
    other.local.write_text("another run's")
    with open_one.local.open("a") as file:
        file.write("2\n")
    yield place, open_one
    for each in (open_one, other):
        if each._temporary is not None:
            each._temporary.cleanup()


def saving(place: Spool, step: int):
    """As `writer`, with the records before the marker."""

    def write(folder: str) -> str:
        place.upload_records(folder)
        return writer(step)(folder)

    return write


def test_records_are_at_the_place_before_a_checkpoint_counts(records, monkeypatch):
    place, _ = records
    written = []
    write = FaultyFileSystem.pipe_file
    note = lambda self, path, value, **kwargs: (written.append(path), write(self, path, value, **kwargs))  # noqa: E731
    monkeypatch.setattr(FaultyFileSystem, "pipe_file", note)
    place.save(saving(place, 2))
    names = [path.rpartition("/")[2] for path in written]
    assert names == ["metrics.jsonl", "a.safetensors", MARKER]
    assert paths.read_text(f"{RUN}/metrics.jsonl") == "1\n2\n"
    assert not place.records.exists()


def test_records_of_an_outage_are_kept_and_delivered_before_the_checkpoint_by_the_next_life(records, monkeypatch):
    place, one = records
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    assert place.save(saving(place, 2)) == str(place.local)
    assert (place.records / "metrics.jsonl").read_text() == "1\n2\n"
    one.local.unlink()  # the machine's temporary files do not matter any more
    monkeypatch.setattr(spool, "_open", [])
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    written = []
    write = FaultyFileSystem.pipe_file
    note = lambda self, path, value, **kwargs: (written.append(path), write(self, path, value, **kwargs))  # noqa: E731
    monkeypatch.setattr(FaultyFileSystem, "pipe_file", note)
    assert made().deliver() == 1
    assert [path.rpartition("/")[2] for path in written] == ["metrics.jsonl", "a.safetensors", MARKER]
    assert paths.read_text(f"{RUN}/metrics.jsonl") == "1\n2\n"
    assert not place.local.exists()


def test_records_another_life_has_gone_on_with_stay_as_they_are(records, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    place, _ = records
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    place.save(saving(place, 2))
    monkeypatch.setattr(spool, "_open", [])
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    paths.write_text_atomic(f"{RUN}/metrics.jsonl", "1\n2 of another life\n3\n")
    assert made().deliver() == 1
    assert paths.read_text(f"{RUN}/metrics.jsonl") == "1\n2 of another life\n3\n"
    assert "has more data than the spilled copy" in caplog.text
    assert not place.local.exists()


def test_records_that_cannot_be_uploaded_at_the_end_are_delivered_by_the_next_life(records, monkeypatch, caplog):
    place, one = records
    monkeypatch.setattr(FaultyFileSystem, "down", True)
    with pytest.raises(ConnectionError):
        one.close()
    assert f"its data is in {place.records}" in caplog.text
    with pytest.raises(StorageFailed, match="records"):
        place.close()
    monkeypatch.setattr(FaultyFileSystem, "down", False)
    assert made().deliver() == 0
    assert paths.read_text(f"{RUN}/metrics.jsonl") == "1\n2\n"
    assert not place.local.exists()
