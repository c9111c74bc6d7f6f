"""Symbolic links in folders that a run writes to and clears: nothing that they lead to is read, changed or removed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.test_store import save
from tests.config.composing import composed
from tpu_experiments.checkpoint.manifest import COMMIT, steps_in
from tpu_experiments.checkpoint.retention import Keep, Retention, remove
from tpu_experiments.checkpoint.store import begin, latest_step, remove_after
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.storage.spool import Spool
from tpu_experiments.tasks.resume_check import clear_place
from tpu_experiments.tasks.setup import make_inputs


def without_marker(place: Path) -> None:
    (place / "elsewhere" / COMMIT).unlink()


def spooled(place: Path) -> None:
    without_marker(place)
    Spool(str(place / "run" / "checkpoints"), key="k", marker=COMMIT)._remove_incomplete()


ACTIONS: dict[str, Callable[[Path], object]] = {
    "retention": lambda p: Retention(f"{p}/run/checkpoints").apply(newest=2, eval_loss=None, keep=Keep(last=1)),
    "removal": lambda p: remove(f"{p}/run/checkpoints/step_00000099"),
    "a roll-back": lambda p: remove_after(f"{p}/run/checkpoints", 1),
    "a save of that step": lambda p: begin(f"{p}/run/checkpoints", step=99, progress={}),
    "a full disk": spooled,
    "a tree": lambda p: paths.remove_tree(f"{p}/run/checkpoints/step_00000099"),
    "a tree with a slash": lambda p: paths.remove_tree(f"{p}/run/checkpoints/step_00000099/"),
    "a marker": lambda p: paths.remove_marked(f"{p}/run/checkpoints/step_00000099", COMMIT),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_link_leads_to_stays(action: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        save(str(checkpoints), step)
    save(str(tmp_path / "other"), 99)
    (tmp_path / "other" / "step_00000099").rename(tmp_path / "elsewhere")
    (checkpoints / "step_00000099").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    assert COMMIT in before
    ACTIONS[action](tmp_path)
    expected = {name: data for name, data in before.items() if name != COMMIT} if action == "a full disk" else before
    assert contents(tmp_path / "elsewhere") == expected


def test_a_link_is_no_checkpoint(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), 1)
    save(str(tmp_path / "other"), 99)
    (tmp_path / "run" / "step_00000099").symlink_to(tmp_path / "other" / "step_00000099")
    assert steps_in(str(tmp_path / "run")) == [1]
    assert latest_step(str(tmp_path / "run")) == 1


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "adapter", "run.log", "lives"])
def test_a_run_folder_with_a_link_in_it_is_refused(name: str, tmp_path: Path) -> None:
    config = composed("name=run", f"output_dir={tmp_path}/outputs")
    open_run(config).create(config)
    (tmp_path / "mine").mkdir()
    (tmp_path / "outputs" / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=f"name=run; .*/{name} is a symbolic link"):
        open_run(config)


def test_an_output_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    config = composed("name=run", f"output_dir={tmp_path}/outputs")
    open_run(config).create(config)
    assert open_run(config).exists()


def test_a_link_among_prepared_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "sample_text-rows").symlink_to(tmp_path)
    config = composed(f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"prepare\.folder=.*sample_text-rows is a symbolic link"):
        make_inputs(config, resolve_stages(config))


def test_a_link_that_waits_for_delivery_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spool = Spool(str(tmp_path / "run" / "checkpoints"), key="k", marker=COMMIT)
    save(str(tmp_path / "other"), 5)
    spool.local.mkdir(parents=True)
    (spool.local / "step_00000005").symlink_to(tmp_path / "other" / "step_00000005")
    before = contents(tmp_path / "other")
    assert spool.deliver() == 0
    assert contents(tmp_path / "other") == before
    assert not (tmp_path / "run").exists()


def test_a_resume_check_clears_its_own_folders_alone(tmp_path: Path) -> None:
    config = composed("task=resume_check", "name=run", f"output_dir={tmp_path}/outputs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("one")
    place = tmp_path / "outputs" / "resume_check" / "run"
    place.mkdir(parents=True)
    (place / "whole").symlink_to(tmp_path / "mine")
    clear_place(config)
    assert contents(tmp_path / "mine") == {"thesis": b"one"}
