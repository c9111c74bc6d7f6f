"""A state that is not copied as a whole: saved file by file in front of the loop, read tensor by tensor."""

import hashlib
import json
import logging
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from tests import faulty
from tests.checkpoint.saved import load_latest
from tests.checkpoint.test_background import is_running
from tests.config.composing import composed
from tests.training.runs import finished, losses
from tests.training.test_saver import RUNTIME, Run
from tests.training.tiny import built
from tpu_experiments.checkpoint import reading
from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.state import flat, read_state, snapshot
from tpu_experiments.checkpoint.store import latest_step
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.storage import paths, retry

pytestmark = pytest.mark.usefixtures("plain_attention")
pytest_plugins = ("tests.gcs",)
LARGE = {"max_copy_gib": 0.0, "max_shard_gib": 0.0002}
"""No copy, and files of 215 kB: the tiny model's embedding is larger, its layers are not."""
COMMON = (
    "model=qwen05b", "data=sample_text", "lora=none", "debug=smoke", "trainer.log_every_steps=1",
    "checkpoint.every_steps=2", "checkpoint.keep_last=100", "checkpoint.max_copy_gib=0",
    "checkpoint.max_shard_gib=0.0002", "sample.max_new_tokens=0", "name=large",
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> BuiltModel:
    return built(composed("hw.runtime=eager", "model=qwen05b", "debug=smoke", "lora=none"), RUNTIME)


@pytest.fixture
def run(model, tmp_path) -> Run:
    return Run(model, str(tmp_path / "checkpoints"), **LARGE)


def is_restored(run: Run, *, step: int) -> bool:
    """Whether a new process's zeros become what the run has, read tensor by tensor."""
    reading._verified.clear()
    parameters = {name: torch.zeros_like(t) for name, t in run.parameters.items()}
    state = {name: {slot: torch.ones_like(t) for slot, t in slots.items()} for name, slots in run.state.items()}
    progress = read_state(run.folder, parameters=parameters, state=state, place=RUNTIME.place, max_held_bytes=0)
    same = all(torch.equal(parameters[name], t) for name, t in run.parameters.items())
    return same and progress.step == step and not any(slots["mean"].any() for slots in state.values())


def test_every_save_is_in_front_in_several_files_and_proven(run, caplog):
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            run.train()
            run.save(step)
            assert latest_step(run.folder) == step
    assert not is_running(run.saver._worker)
    assert sum("exceeds checkpoint.max_copy_gib=0: checkpoints block training" in line for line in caplog.messages) == 1
    files = sorted(p.name for p in (Path(run.folder) / "step_00000003").glob("parameters-*"))
    assert len(files) >= 3
    assert files[-1] == f"parameters-{len(files):05d}-of-{len(files):05d}.safetensors"
    sizes = [(Path(run.folder) / "step_00000003" / name).stat().st_size for name in files]
    assert sum(size > 0.0002 * 2**30 + 10_000 for size in sizes) == 1, "the embedding"
    proof = run.proof(1)
    assert proof["answer"]["equal_bits"]
    assert proof["trained"]["changed"] == proof["trained"]["tensors"] == len(run.parameters)
    assert proof["read_back"] == len(list((Path(run.folder) / "step_00000001").iterdir())) - 1
    assert is_restored(run, step=3)


def test_no_more_than_one_file_of_tensors_is_copied_at_a_time(run):
    """Each copy is dropped before the next is made."""
    run.train()
    state = snapshot(run.progress, parameters=run.parameters, state=run.state)
    largest = max(t.nbytes for t in run.parameters.values())
    for group in state.groups:
        for _, tensors in state.files(group, max_bytes=200_000):
            assert sum(t.nbytes for t in tensors.values()) <= max(largest, 200_000)
            assert all(
                t.data_ptr() != run.parameters[name].data_ptr() for name, t in tensors.items() if group[0] == "p"
            )


def test_what_a_resume_replaces_is_dropped_one_by_one(run):
    """A device holds one tensor twice at a time, not the state."""
    run.train()
    run.save(1)
    parameters = {name: t.clone() for name, t in run.parameters.items()}
    state = {name: {slot: t.clone() for slot, t in slots.items()} for name, slots in run.state.items()}
    old = [weakref.ref(t) for t in [*parameters.values(), *flat(state).values()]]
    alive = []

    def place(tensor, *, name):
        alive.append(sum(reference() is not None for reference in old))
        return tensor

    read_state(run.folder, parameters=parameters, state=state, place=place, max_held_bytes=0)
    assert alive == list(range(len(old), 0, -1))


def test_one_that_fits_is_copied_and_has_one_file_a_group(model, tmp_path):
    run = Run(model, str(tmp_path))
    run.train()
    run.save(1)
    run.save(2)
    before = {name: t.clone() for name, t in run.parameters.items()}
    run.train()  # beside the second save
    run.saver.join()
    target = tmp_path / "step_00000002"
    assert {"optimizer.safetensors", "parameters.safetensors"} <= {p.name for p in target.iterdir()}
    saved = load_latest(run.folder)[1]["parameters"]
    assert all(torch.equal(saved[name], t) for name, t in before.items())


def test_a_checkpoint_of_one_file_a_group_is_read_tensor_by_tensor(model, tmp_path):
    run = Run(model, str(tmp_path))
    run.train()
    run.save(1)
    assert is_restored(run, step=1)


def test_an_untrained_model_is_not_saved(run):
    with pytest.raises(TrainingStopped, match="so it would be an untrained model"):
        run.save(7)
    assert latest_step(run.folder) == 0


def test_adapters_whose_halves_are_in_two_files_are_checked_together(tmp_path):
    adapters = built(composed("hw.runtime=eager", "model=qwen05b", "debug=smoke", "lora=all_linear_r8"), RUNTIME)
    run = Run(adapters, str(tmp_path), max_copy_gib=0.0, max_shard_gib=1e-9)
    run.train()
    run.save(1)
    assert len(list((tmp_path / "step_00000001").glob("parameters-*-of-00028.safetensors"))) == 28
    assert (run.proof(1)["trained"]["modules"], run.proof(1)["trained"]["with_effect"]) == (14, 14)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs hands aiohttp files of 1 MiB so
def test_in_a_bucket(model, gcs_bucket):
    run = Run(model, f"{gcs_bucket}/checkpoints", **LARGE)
    run.train()
    run.save(1)
    run.saver.join()
    names = paths.list_names(f"{run.folder}/step_00000001")
    assert sum(name.startswith("optimizer-") for name in names) >= 3
    assert is_restored(run, step=1)


def test_a_storage_that_fails_between_two_files(model, monkeypatch, tmp_path):
    """The n-th request of a save is refused for good: the checkpoint before it counts, and the run can go on."""
    monkeypatch.setattr(retry, "pause", lambda seconds: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    faulty.wipe()
    run = Run(model, "faulty://bkt/checkpoints", **LARGE)
    run.train()
    run.save(1)
    with faulty.going_wrong(None, -1) as kind:
        run.save(2)
        total = kind.count
    for n in range(0, total, 5):
        run.train()
        with faulty.going_wrong("fails", n):
            run.save(3)
        assert is_restored(run, step=3), f"request {n}"
    faulty.wipe()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Four virtual devices, the parameters split over them."""
    folder = tmp_path_factory.mktemp("large")
    return folder, finished(*COMMON, "hw.parallel=spmd", "hw.num_devices=4", output_dir=folder)


def cut(uninterrupted, tmp_path: Path, *, lost: str) -> Path:
    """The run as a kill before step 6 leaves it, with a file of the checkpoint of step 4 lost."""
    shutil.copytree(uninterrupted[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "large"
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_00000006")
    (folder / "checkpoints" / "step_00000004" / lost).unlink()
    return folder


@pytest.mark.slow
@pytest.mark.xla
def test_resumed_on_the_same_devices_it_ends_with_the_same_bytes(uninterrupted, tmp_path):
    whole, first = uninterrupted
    folder = cut(uninterrupted, tmp_path, lost="optimizer-00003-of-00006.safetensors")
    second = finished(*COMMON, "hw.parallel=spmd", "hw.num_devices=4", output_dir=tmp_path)
    assert losses(tmp_path) == losses(whole)
    assert second["eval_loss"] == first["eval_loss"]
    assert second["compiles_after_warmup"] == 0
    manifests = [root / "checkpoints" / "step_00000006" / "COMMIT.json" for root in (folder, whole / "large")]
    ours, theirs = (json.loads(place.read_text())["files"] for place in manifests)
    assert ours == theirs
    models = sorted((folder / "model").glob("model*"))
    assert [p.name for p in models] == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"
    ]  # fmt: skip
    assert all(p.read_bytes() == (whole / "large" / "model" / p.name).read_bytes() for p in models)
    assert second["proof"]["sha256"] == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in models[:-1]}
    assert second["proof"]["answer"]["equal_bits"]
    assert "step_00000004 is incomplete" in (folder / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.xla
def test_resumed_on_one_device_it_has_the_same_losses(uninterrupted, tmp_path):
    cut(uninterrupted, tmp_path, lost="parameters-00001-of-00003.safetensors")
    finished(*COMMON, "hw.runtime=eager", output_dir=tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted[0]), abs=1e-5)
