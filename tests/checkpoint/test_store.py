"""Checkpoints: complete or invisible, verified on reading, kept by number."""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import load_latest, save_checkpoint
from tpu_experiments.checkpoint.store import COMMIT, latest_progress, latest_step
from tpu_experiments.storage import paths


def save(folder: str, step: int, *, keep_last: int = 10) -> str:
    groups = {"parameters": {"a.lora_A": torch.full((2, 3), float(step))}, "optimizer": {"/count": torch.tensor([1.0])}}
    return save_checkpoint(folder, step=step, groups=groups, progress={"step": step, "tokens": 7}, keep_last=keep_last)


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path) -> str:
    if request.param == "memory":
        return f"memory://{tmp_path.name}/checkpoints"
    return str(tmp_path / "checkpoints")


def test_round_trip(folder):
    assert load_latest(folder) is None
    assert latest_step(folder) == 0
    save(folder, 3)
    save(folder, 12)
    progress, tensors = load_latest(folder)
    assert progress == {"step": 12, "tokens": 7}
    torch.testing.assert_close(tensors["parameters"]["a.lora_A"], torch.full((2, 3), 12.0))
    assert set(tensors) == {"parameters", "optimizer"}
    assert latest_step(folder) == 12
    assert latest_progress(folder) == (12, {"step": 12, "tokens": 7})


def test_only_the_newest_are_kept(folder):
    for step in (1, 2, 3, 4):
        save(folder, step, keep_last=2)
    assert load_latest(folder)[0]["step"] == 4
    assert paths.list_names(folder) == ["step_00000003", "step_00000004"]


def damage_truncate(target):
    file = target / "parameters.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flip_a_byte(target):
    file = target / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def damage_lose_a_file(target):
    (target / "progress.json").unlink()


def damage_no_commit(target):
    (target / COMMIT).unlink()


def damage_torn_commit(target):
    (target / COMMIT).write_text((target / COMMIT).read_text()[:20])


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_flip_a_byte, damage_lose_a_file, damage_no_commit, damage_torn_commit]
)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog, damage):
    save(str(tmp_path), 1)
    damage(tmp_path / save(str(tmp_path), 2))
    with caplog.at_level(logging.WARNING):
        progress, _ = load_latest(str(tmp_path))
    assert progress["step"] == 1
    assert "step_00000002" in caplog.text
    assert latest_step(str(tmp_path)) == 1


def test_saving_again_replaces_an_unfinished_one(tmp_path):
    target = tmp_path / save(str(tmp_path), 5)
    (target / COMMIT).unlink()
    (target / "stray").write_text("from an earlier life")
    save(str(tmp_path), 5)
    assert load_latest(str(tmp_path))[0]["step"] == 5
    assert not (target / "stray").exists()
    assert set(json.loads((target / COMMIT).read_text())["files"]) == {
        "parameters.safetensors",
        "optimizer.safetensors",
        "progress.json",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_bit_of_every_shape_comes_back(folder, dtype):
    tensors = {
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype),
    }
    save_checkpoint(folder, step=1, groups={"group": tensors}, progress={"step": 1}, keep_last=1)
    got = load_latest(folder)[1]["group"]
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], t) and got[name].dtype == dtype for name, t in tensors.items())


def test_a_damaged_later_checkpoint_does_not_push_out_a_new_one(tmp_path, caplog):
    """A run that went on from step 1 because step 9 is torn must keep what it then saves."""
    save(str(tmp_path), 1, keep_last=1)
    damage_no_commit(tmp_path / save(str(tmp_path), 9, keep_last=2))
    assert latest_step(str(tmp_path)) == 1
    save(str(tmp_path), 5, keep_last=1)
    assert latest_step(str(tmp_path)) == 5
    assert paths.list_names(str(tmp_path)) == ["step_00000005"]
    assert "step_00000009" in caplog.text


def test_without_any_complete_checkpoint_there_is_none(tmp_path, caplog):
    for step in (1, 2):
        damage_flip_a_byte(tmp_path / save(str(tmp_path), step))
    assert load_latest(str(tmp_path)) is None
    assert latest_step(str(tmp_path)) == 0
    assert "optimizer.safetensors differs from its commit record" in caplog.text


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    target = tmp_path / save(str(tmp_path), 1)
    for file in target.iterdir():
        content = file.read_bytes()
        header = content if file.suffix == ".json" else content[8 : 8 + int.from_bytes(content[:8], "little")]
        assert json.loads(header), file.name


def test_a_checkpoint_is_read_whole_once_in_a_process(tmp_path, caplog):
    """Its manifest is read every time: one that was written anew is verified anew."""
    target = Path(save(str(tmp_path), 3))
    assert latest_step(str(tmp_path)) == 3
    damage_flip_a_byte(target)
    assert latest_step(str(tmp_path)) == 3  # the verdict of before
    assert load_latest(str(tmp_path)) is None  # but what is used is looked at
    (target / COMMIT).write_text((target / COMMIT).read_text().replace('"eval_loss": null', '"eval_loss": 1.0'))
    assert latest_step(str(tmp_path)) == 0
    assert "another SHA-256" in caplog.text


def test_sizes_are_checked_before_any_file_is_read(tmp_path, caplog):
    target = Path(save(str(tmp_path), 3))
    damage_truncate(target)
    (target / "optimizer.safetensors").unlink()
    (target / "optimizer.safetensors").mkdir()  # reading it would raise
    assert latest_step(str(tmp_path)) == 0
    assert "differs from its commit record" in caplog.text
