"""Every operation of a save goes wrong once, in every way: afterwards the old checkpoint or the new one is found.

The parameters lie in two files, the optimizer's state in one; what is found is read tensor by tensor.
"""

import contextlib

import pytest
import torch

from tests import faulty
from tests.checkpoint.saved import save_checkpoint
from tests.faulty import FAULTS, Died, going_wrong
from tests.tiers import only
from tpu_experiments.checkpoint import reading
from tpu_experiments.checkpoint.store import read_latest
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import retry

FOLDER = "faulty://bkt/runs/x/checkpoints"


def content(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    names = {"parameters": ("a", "b"), "optimizer": ("a",)}
    return {group: {name: torch.randn(7, 5, generator=generator) for name in names[group]} for group in names}


def save(step: int) -> None:
    groups, progress = content(step), {"step": step, "data": {}}
    save_checkpoint(FOLDER, step=step, groups=groups, progress=progress, keep_last=2, max_bytes=150)


def found() -> int | None:
    """Step of what a new process finds, after checking every number of it."""
    reading._verified.clear()

    def restore(progress, groups) -> int:
        expected = content(progress["step"])
        assert groups.keys() == expected.keys()
        for group, tensors in expected.items():
            assert groups[group].keys() == tensors.keys()
            assert all(torch.equal(groups[group][name], t) for name, t in tensors.items())
        return int(progress["step"])

    return read_latest(FOLDER, restore, max_held_bytes=0)


@pytest.fixture(autouse=True)
def storage(monkeypatch):
    """Three checkpoints were made, the first is gone by retention."""
    monkeypatch.setattr(retry, "pause", lambda seconds: True)
    faulty.wipe()
    for step in (2, 4, 6):
        save(step)
    yield
    faulty.wipe()


def num_operations() -> int:
    with going_wrong(None, -1) as kind:
        save(8)
        assert found() == 8
        return kind.count


@pytest.mark.parametrize("fault", only(["dies"], FAULTS))
def test_every_operation_of_a_save_and_a_load(fault):
    total = num_operations()
    assert total > 10
    for n in range(total):
        faulty.wipe()
        for step in (2, 4, 6):
            save(step)
        with contextlib.suppress(Died, OSError, ConfigError), going_wrong(fault, n):
            save(8)
            found()
        before = found()
        assert before in (6, 8), f"operation {n}"
        if fault in ("fails", "answer_lost", "delays"):
            assert before == 8, f"operation {n} was to be repeated"
        save(10)  # the same process or the next goes on
        assert found() == 10, f"operation {n}"


def test_a_torn_object_is_named_and_passed_over(caplog):
    key = next(
        name
        for name in faulty.snapshot()
        if "step_00000006" in name and name.endswith("parameters-00002-of-00002.safetensors")
    )
    faulty.FaultyFileSystem.store[key].truncate(20)
    assert found() == 4
    assert "step_00000006" in caplog.text
