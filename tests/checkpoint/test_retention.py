"""Which checkpoints stay: the newest, the multiples, the best; what is damaged or foreign never pushes one out."""

import shutil

import pytest
import torch

from tests.checkpoint.test_store import save
from tpu_experiments.checkpoint.manifest import COMMIT, steps_in
from tpu_experiments.checkpoint.retention import Keep, Retention, remove, steps_to_keep
from tpu_experiments.checkpoint.store import add_tensors, begin, commit
from tpu_experiments.storage import paths

CASES = {
    "the newest": (Keep(last=2), {40, 50}),
    "multiples too": (Keep(last=1, every=20), {20, 40, 50}),
    "the best too": (Keep(last=1, best=1), {20, 50}),
    "of equal losses the earlier": (Keep(last=1, best=2), {20, 30, 50}),
    "a loss that is not finite is none": (Keep(last=1, best=9), {20, 30, 40, 50}),
}


@pytest.mark.parametrize("case", CASES)
def test_policy(case):
    keep, expected = CASES[case]
    losses = {20: 1.0, 30: 2.0, 40: 2.0, 10: float("nan")}
    assert steps_to_keep([50, 10, 30, 20, 40], losses, keep=keep) == expected


def test_the_best_are_found_again_by_another_process(tmp_path):
    """The losses are in the markers, so a resumed run keeps what an earlier life found to be the best."""
    folder = str(tmp_path)
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.5}
    for step, loss in losses.items():
        draft = begin(folder, step=step, progress={"step": step})
        add_tensors(draft, "parameters.safetensors", {"a": torch.zeros(1)})
        commit(draft, eval_loss=loss)
        Retention(folder).apply(newest=step, eval_loss=loss, keep=Keep(last=1, best=2))
    assert steps_in(folder) == [20, 40, 50]


def test_torn_ones_go_and_foreign_ones_stay(tmp_path, caplog):
    folder = str(tmp_path)
    for step in (1, 2, 3, 4):
        save(folder, step)
    (tmp_path / "step_00000002" / COMMIT).unlink()
    (tmp_path / "step_00000003" / "optimizer.pt").write_bytes(b"\x80\x04.")
    (tmp_path / "notes").mkdir()
    Retention(folder).apply(newest=4, eval_loss=None, keep=Keep(last=2))
    assert paths.list_names(folder) == ["notes", "step_00000001", "step_00000003", "step_00000004"]
    assert "optimizer.pt" in caplog.text


def test_what_cannot_be_removed_is_reported_and_left(tmp_path, caplog, monkeypatch):
    target = tmp_path / "step_00000001"
    (target / COMMIT / "in the way").mkdir(parents=True)

    def busy(path):
        raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    remove(str(target))
    assert "could not be removed" in caplog.text
    assert target.exists()
