"""result.json holds every field, strictly as JSON."""

import json
from pathlib import Path

import pytest

from tpu_experiments.loggers.result import FIELDS, peak_host_rss_gib, require_fields, write_result
from tpu_experiments.storage.run_folder import RunFolder


@pytest.mark.parametrize("missing", FIELDS)
def test_each_field_is_required(missing: str, tmp_path: Path) -> None:
    result = {name: 0 for name in FIELDS if name != missing}
    with pytest.raises(AssertionError, match=missing):
        require_fields(result)
    with pytest.raises(AssertionError, match=missing):
        write_result(RunFolder(str(tmp_path), "x"), result)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_reads_it_as_finished_and_nan_is_null(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    (tmp_path / "x").mkdir()
    write_result(folder, dict.fromkeys(FIELDS, 0) | {"status": "finished", "eval_loss": float("nan")})
    text = (tmp_path / "x" / "result.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["eval_loss"] is None
    found = folder.finished()
    assert found is not None
    assert found["status"] == "finished"


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    (tmp_path / "x").mkdir()
    write_result(folder, dict.fromkeys(FIELDS, 0) | {"name": "old"})
    with pytest.raises(TypeError):
        write_result(folder, dict.fromkeys(FIELDS, 0) | {"name": object()})
    assert json.loads((tmp_path / "x" / "result.json").read_text())["name"] == "old"


def test_peak_memory_is_in_gib() -> None:
    assert 0.01 < peak_host_rss_gib() < 1000
