"""run.log and the terminal: who writes what, and that nothing is written before the run folder is there."""

import logging
import re
import uuid
import warnings
from pathlib import Path

import pytest

from tpu_experiments.loggers.runlog import OURS, held_back, start_run_log, stop_run_log
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder

log = logging.getLogger("tpu_experiments.somewhere")


pytestmark = pytest.mark.usefixtures("root_logger")


@pytest.mark.parametrize("place", ["local", "memory"])
def test_records_before_the_folder_reach_run_log(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(str(tmp_path) if place == "local" else f"memory://{uuid.uuid4().hex}", "x")
    start_run_log(None, rank=0)
    log.info("before %d", 1)
    assert paths.list_names(folder.output_dir) == []
    paths.make_dirs(folder.path())
    start_run_log(folder, rank=0)
    log.warning("after")
    stop_run_log()
    log.error("not ours any more")
    lines = paths.read_text(folder.path("run.log")).splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO tpu_experiments.somewhere: before 1",
        "WARNING tpu_experiments.somewhere: after",
    ]
    assert re.fullmatch(r"\d\d:\d\d:\d\d before 1\n\d\d:\d\d:\d\d warning: after\n", capsys.readouterr().err)


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    paths.make_dirs(folder.path())
    for life in (1, 2):
        start_run_log(folder, rank=0)
        log.info("life %d", life)
        stop_run_log()
    assert [line[-6:] for line in paths.read_text(folder.path("run.log")).splitlines()] == ["life 1", "life 2"]


def test_a_stop_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start_run_log(None, rank=0)
    log.info("refused soon")
    stop_run_log()
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_warn_by_name_and_leave_run_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_run_log(RunFolder(str(tmp_path), "x"), rank=3)
    log.info("unheard")
    log.warning("heard")
    stop_run_log()
    assert re.fullmatch(r"\d\d:\d\d:\d\d rank 3: warning: heard\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_third_parties_are_quiet_and_warnings_are_captured(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    paths.make_dirs(folder.path())
    start_run_log(folder, rank=0)
    logging.getLogger("httpx").info("GET /")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old name", FutureWarning, stacklevel=1)
    stop_run_log()
    text = paths.read_text(folder.path("run.log"))
    assert "FutureWarning: old name" in text
    assert "GET /" not in text


def test_a_traceback_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(str(tmp_path), "x")
    paths.make_dirs(folder.path())
    start_run_log(folder, rank=0)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    stop_run_log()
    assert "ValueError: why" in capsys.readouterr().err
    assert "ValueError: why" in paths.read_text(folder.path("run.log"))


def test_starting_twice_leaves_one_set_of_handlers(tmp_path: Path, root_logger: logging.Logger) -> None:
    start_run_log(None, rank=0)
    start_run_log(None, rank=0)
    assert len([h for h in root_logger.handlers if isinstance(h, OURS)]) == 2  # terminal and memory
    stop_run_log()
    assert not [h for h in root_logger.handlers if isinstance(h, OURS)]


def test_what_is_logged_while_a_line_is_written_comes_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(str(tmp_path), "x")
    paths.make_dirs(folder.path())
    start_run_log(folder, rank=0)
    log.info("before")
    with held_back():
        log.info("meanwhile")
        assert "meanwhile" not in capsys.readouterr().err
        assert "meanwhile" in paths.read_text(folder.path("run.log"))
    log.info("after")
    stop_run_log()
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["meanwhile", "after"]
