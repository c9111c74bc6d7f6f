"""Large groups: several files of a bounded size, tensors read one by one, each of them what was looked at."""

import logging
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import load_latest, save_checkpoint
from tests.checkpoint.test_hostile import replaced
from tpu_experiments.checkpoint.store import latest_step, read_latest
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage.tensors import chunks_of, file_name, group_in, shards

SHARDS = [f"parameters-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def content(step: int) -> dict[str, torch.Tensor]:
    """Four tensors of 400, 4, 800 and 400 bytes."""
    generator = torch.Generator().manual_seed(step)
    sizes = {"embed": 100, "bias": 1, "head": 200, "norm": 100}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def save(folder: Path, step: int) -> Path:
    groups = {"optimizer": {"/count": torch.tensor([float(step)])}, "parameters": content(step)}
    target = save_checkpoint(str(folder), step=step, groups=groups, progress={"step": step}, keep_last=9, max_bytes=600)
    return Path(target)


def found(folder: Path, *, max_held_bytes: float) -> int | None:
    """Step of the checkpoint that is used, after a look at all its numbers."""

    def restore(progress, groups) -> int:
        expected = content(progress["step"])
        assert groups["parameters"].keys() == expected.keys()
        assert all(torch.equal(groups["parameters"][name], t) for name, t in expected.items())
        assert groups["optimizer"]["/count"].item() == progress["step"]
        return progress["step"]

    return read_latest(str(folder), restore, max_held_bytes=max_held_bytes)


@pytest.mark.parametrize("max_held_bytes", [0, 10**9], ids=["tensor by tensor", "whole"])
def test_a_group_above_the_bound_has_several_files_and_comes_back(tmp_path, max_held_bytes):
    target = save(tmp_path, 1)
    assert sorted(p.name for p in target.glob("*.safetensors")) == ["optimizer.safetensors", *SHARDS]
    assert max(p.stat().st_size for p in target.glob("*.safetensors")) < 600 + 400  # the header, and one large tensor
    assert found(tmp_path, max_held_bytes=max_held_bytes) == 1


def test_a_tensor_is_never_divided_and_the_order_stays():
    assert shards({"a": 10, "b": 1, "c": 1, "d": 1}, max_bytes=2) == [["a"], ["b", "c"], ["d"]]
    assert shards({}, max_bytes=2) == [[]]
    assert [group_in(file_name("parameters", n, c)) for n, c in ((1, 1), (12, 345))] == ["parameters"] * 2
    assert group_in("parameters-1-of-2.safetensors") is None


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("max_held_bytes", [0, 10**9], ids=["tensor by tensor", "whole"])
@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["tampered", "missing"])
def test_a_damaged_shard_is_named_and_the_checkpoint_passed_over(tmp_path, caplog, damage, max_held_bytes):
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / SHARDS[1])
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path, max_held_bytes=max_held_bytes) == 1
    assert "step_00000002" in caplog.text
    assert SHARDS[1] in caplog.text


def test_a_shard_that_changes_after_it_was_checked_is_not_used(tmp_path, caplog):
    """Its checkpoint was verified in this process; the tensor's own checksum tells."""
    save(tmp_path, 1)
    target = save(tmp_path, 2)
    assert latest_step(str(tmp_path)) == 2
    flip(target / SHARDS[2])
    assert latest_step(str(tmp_path)) == 2  # what it looked at before
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path, max_held_bytes=0) == 1
    assert f"{SHARDS[2]} was changed while it was read: norm has another SHA-256" in caplog.text
    assert latest_step(str(tmp_path)) == 1


def test_a_tensor_in_two_files_is_refused(tmp_path):
    target = save(tmp_path, 1)
    replaced(target, SHARDS[1], b"".join(chunks_of({"embed": torch.zeros(3)})))
    for read in (load_latest, lambda folder: found(Path(folder), max_held_bytes=0)):
        with pytest.raises(ConfigError, match="embed is in another file as well"):
            read(str(tmp_path))


def test_what_is_no_file_of_tensors_is_refused_in_pieces_too(tmp_path):
    target = save(tmp_path, 1)
    replaced(target, SHARDS[1], b"\x80\x04K\x01." + bytes(20))
    with pytest.raises(ConfigError, match="its header should have"):
        latest_step(str(tmp_path))
