"""Saves beside the steps: what is saved is what was, errors surface, nothing unproven counts."""

import json
import threading
from pathlib import Path

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint.saved import load_latest
from tests.config.composing import composed
from tests.training.tiny import built
from tpu_experiments.checkpoint.errors import TrainingStopped, UnprovenError
from tpu_experiments.checkpoint.manifest import COMMIT
from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.checkpoint.proof import InitialTensors, LossComparison
from tpu_experiments.checkpoint.saver import Saver
from tpu_experiments.checkpoint.state import read_state, snapshot
from tpu_experiments.checkpoint.store import latest_step
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.schema import CheckpointConfig
from tpu_experiments.data.batches import Batch
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.objectives.next_token import next_token_loss
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.storage.spool import Spool
from tpu_experiments.training.evaluation import Evaluator

pytestmark = pytest.mark.usefixtures("plain_attention")
RUNTIME = EagerRuntime(HwConfig(name="cpu", runtime="eager", device="cpu", num_devices=1, num_threads=1))


class Forgetful(MemoryFileSystem):
    """Storage that changes the last byte of every tensor file."""

    protocol = "forgetful"
    store: dict[str, object] = {}  # noqa: RUF012 - fsspec's memory file system keeps its files here
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path, value, **kwargs):
        """Write."""
        damaged = value[:-1] + bytes([value[-1] ^ 1]) if path.endswith("parameters.safetensors") else value
        return super().pipe_file(path, damaged, **kwargs)


register_implementation("forgetful", Forgetful, clobber=True)


class Run:
    """A tiny trained model with what saves it, in plain torch."""

    def __init__(self, model: BuiltModel, folder: str, **settings: object) -> None:
        self.runtime, self.model = RUNTIME, model
        self.parameters = {name: t.clone() for name, t in model.trainable.items()}
        self.state = {name: {"mean": torch.zeros_like(t)} for name, t in self.parameters.items()}
        self.progress = Progress(peak_lr=1e-3, stages=[StageRecord("main")])
        is_adapter = any("lora_" in name for name in self.parameters)
        start = InitialTensors(self.model.fingerprints, self.model.initial, is_adapter=is_adapter)
        parts = {"runtime": self.runtime, "parameters": self.parameters}
        evaluator = Evaluator(self.model.module, row_loss=next_token_loss, **parts)
        self.answers = LossComparison(evaluator, rows(), **parts)
        self.folder = folder
        settings = CheckpointConfig(**{"keep_last": 9} | settings)
        spool = Spool(folder, key="test", marker=COMMIT)
        self.saver = Saver(settings, spool, runtime=self.runtime, start=start, loss_comparison=self.answers)

    def train(self) -> None:
        """Change every parameter in place, as a step does."""
        for index, tensor in enumerate(self.parameters.values()):
            tensor += 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))

    def save(self, step: int, **how: bool) -> None:
        self.progress.advance(step)
        take = lambda: snapshot(self.progress, parameters=self.parameters, state=self.state)  # noqa: E731
        self.saver.save(take, step=step, **{"is_interval": True} | how)

    def proof(self, step: int) -> dict:
        text = (Path(self.folder) / f"step_{step:08d}" / "COMMIT.json").read_text()
        return json.loads(text)["proof"]


@pytest.fixture(scope="module")
def model() -> BuiltModel:
    config = composed("hw.runtime=eager", "model=qwen05b", "debug=smoke", "lora=all_linear_r8")
    return built(config, RUNTIME)


def rows() -> Batch:
    ids = torch.arange(10, 42, dtype=torch.int32).reshape(2, 16).numpy()
    ones = torch.ones(2, 16, dtype=torch.int32).numpy()
    return Batch(ids, ones, torch.arange(16, dtype=torch.int32).repeat(2, 1).numpy(), ones, ["a", "b"])


@pytest.fixture
def run(model, tmp_path) -> Run:
    return Run(model, str(tmp_path / "checkpoints"))


def test_what_is_saved_is_what_was_when_it_was_asked_for(run):
    """The second save is in the background; steps go on in the same buffers meanwhile."""
    run.train()
    run.save(1)
    before = {name: t.clone() for name, t in run.parameters.items()}
    run.save(2)
    run.train()
    run.saver.join()
    progress, groups = load_latest(run.folder)
    assert progress["step"] == 2
    assert all(torch.equal(groups["parameters"][name], t) for name, t in before.items())
    assert not any(torch.equal(run.parameters[name], t) for name, t in before.items())


def test_the_position_that_is_saved_is_the_one_it_was_asked_for_at(run, monkeypatch):
    """The save in the background begins only after the loop has gone on."""
    run.train()
    run.save(1)
    gate, save = threading.Event(), run.saver._spool.save

    def late(*arguments, **settings):
        assert gate.wait(60)
        return save(*arguments, **settings)

    monkeypatch.setattr(run.saver._spool, "save", late)
    run.progress.stages[-1].tokens = 20
    run.save(2)
    run.progress.advance(3)
    run.progress.stages[-1].tokens = 30
    run.progress.stages.append(StageRecord("next"))
    gate.set()
    run.saver.join()
    progress, _ = load_latest(run.folder)
    assert (progress["step"], [stage["name"] for stage in progress["stages"]]) == (2, ["main"])
    assert progress["stages"][0]["tokens"] == 20


def test_the_first_and_the_last_of_a_stage_answer_and_all_are_checked(run):
    run.train()
    for step, how in {1: {}, 2: {}, 3: {"is_interval": False, "ends_stage": True}, 4: {"is_interval": False}}.items():
        run.save(step, **how)
    proofs = {step: run.proof(step) for step in (1, 2, 3, 4)}
    assert [step for step, proof in proofs.items() if proof.get("answer", {}).get("equal_bits")] == [1, 3]
    assert proofs[1]["answer"]["rows"] == 2
    assert {proof["read_back"] for proof in proofs.values()} == {3}
    trained = proofs[2]["trained"]
    assert trained["changed"] == trained["tensors"] == 28
    assert trained["with_effect"] == trained["modules"] == 14


def test_without_proof_there_is_none(model, tmp_path):
    run = Run(model, str(tmp_path), prove=False)
    run.save(1)
    run.saver.join()
    assert run.proof(1) is None


@pytest.mark.parametrize("only", ["nothing", "lora_A"])
def test_an_untrained_adapter_is_not_saved(run, only):
    for name, tensor in run.parameters.items():
        if name.endswith(only):
            tensor += 1.0
    words = "its initial value after 7 steps" if only == "nothing" else "B A is zero in all 14 adapted modules"
    with pytest.raises(TrainingStopped, match=words) as caught:
        run.save(7)
    assert str(caught.value).startswith("stopped instead of saving: ")
    assert latest_step(run.folder) == 0


def test_it_is_where_no_step_had_a_learning_rate(run):
    run.progress.peak_lr = 0.0
    run.save(7)
    assert "nothing had to change" in run.proof(7)["trained"]["note"]


def test_storage_that_gives_back_something_else_stops_the_run(model):
    run = Run(model, "forgetful://checkpoints")
    run.train()
    with pytest.raises(TrainingStopped, match=r"parameters\.safetensors differs from its commit record"):
        run.save(1)
    assert latest_step(run.folder) == 0


def test_an_error_in_the_background_surfaces_at_the_next_look(run, tmp_path):
    run.train()
    run.save(1)
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").write_text("in the way")
    run.save(2)
    run.saver._worker._thread.join()
    with pytest.raises(TrainingStopped, match=r"a checkpoint could not be saved: .*Not a directory"):
        run.saver.raise_background_error()
    run.saver.raise_background_error()


def test_another_answer_is_found_and_the_live_parameters_stay(run):
    run.train()
    before = dict(run.parameters)
    other = {name: t.clone() for name, t in before.items()}
    assert run.answers.compare_with(lambda: other)["equal_bits"]
    name = "model.layers.0.self_attn.q_proj.lora_B"
    other[name] *= 1.5
    with pytest.raises(UnprovenError, match=r"with the live parameters and .* read back from storage"):
        run.answers.compare_with(lambda: other)
    assert all(run.parameters[n] is t for n, t in before.items())


@pytest.mark.parametrize("change", ["shape", "type", "missing", "extra", "slot"])
def test_tensors_of_another_run_are_refused_with_both_shapes(run, change):
    name = "model.layers.0.self_attn.q_proj.lora_A"
    copy = snapshot(run.progress, parameters=run.parameters, state=run.state)
    group = copy.groups["optimizer" if change == "slot" else "parameters"]
    if change == "shape":
        group[name] = group[name][:, :-1].contiguous()
    elif change == "type":
        group[name] = group[name].double()
    elif change == "missing":
        del group[name]
    elif change == "extra":
        group["model.norm.weight"] = torch.ones(1)
    else:
        group[f"{name}/mean"] = torch.ones(3)
    run.progress.peak_lr = 0.0
    run.saver.settings.prove = False
    run.saver.save(lambda: copy, step=1, is_interval=False)
    words = {
        "shape": rf"parameters.safetensors; {name} is float32 \(8, 63\), and float32 \(8, 64\) here",
        "type": rf"{name} is float64 \(8, 64\), and float32 \(8, 64\) here",
        "missing": rf"lacks 1 tensors of this run \(first {name}\)",
        "extra": r"has 1 that this run has not \(first model.norm.weight\)",
        "slot": rf"optimizer.safetensors; {name}/mean is float32 \(3,\), and float32 \(8, 64\) here",
    }
    with pytest.raises(ConfigError, match=words[change]):
        read_state(run.folder, parameters=run.parameters, state=run.state, place=run.runtime.place)


def test_minutes_of_the_clock(model, tmp_path):
    run = Run(model, str(tmp_path), every_steps=0, every_minutes=1.0)
    assert not run.saver.is_due(5, is_evaluated=False, agrees=True)
    run.saver._saved_at -= 60
    assert not run.saver.is_due(5, is_evaluated=False, agrees=False)
    assert run.saver.is_due(5, is_evaluated=False, agrees=True)
    run.train()
    run.save(5)
    assert not run.saver.is_due(6, is_evaluated=False, agrees=True)


def test_steps_and_evaluations(model, tmp_path):
    run = Run(model, str(tmp_path), every_steps=4, keep_best=1)
    due = {step: run.saver.is_due(step, is_evaluated=step == 6, agrees=False) for step in (4, 5, 6, 8)}
    assert due == {4: True, 5: False, 6: True, 8: True}


@pytest.mark.parametrize("place", ["in front", "in the background"])
@pytest.mark.parametrize("group", ["parameters", "optimizer"])
def test_what_nobody_could_go_on_from_is_not_saved(run, group, place):
    run.train()
    if place == "in the background":
        run.save(1)
    before = latest_step(run.folder)
    name = "model.layers.0.self_attn.q_proj.lora_A"
    shown, tensor = {
        "parameters": (name, run.parameters[name]),
        "optimizer": (f"{name}/mean", run.state[name]["mean"]),
    }[group]
    tensor.fill_(torch.nan)

    def save() -> None:
        run.save(2)
        run.saver.join()

    words = rf"stopped instead of saving: 512 of 512 values of {group} {shown} are NaN or infinite"
    with pytest.raises(TrainingStopped, match=words):
        save()
    assert latest_step(run.folder) == before


@pytest.mark.parametrize("group", ["parameters", "optimizer"])
@pytest.mark.parametrize("max_held_bytes", [0, float("inf")], ids=["one by one", "held"])
def test_a_checkpoint_with_values_that_are_no_numbers_is_refused(model, tmp_path, group, max_held_bytes):
    """Of another program: this one's proof does not let it count."""
    run = Run(model, str(tmp_path), prove=False)
    run.train()
    name = "model.layers.1.mlp.up_proj.lora_B"
    run.parameters[name][0, 0] = torch.inf if group == "parameters" else 0.0
    run.state[name]["mean"][0, 0] = torch.nan if group == "optimizer" else 0.0
    run.save(3, is_interval=False)
    shown = name if group == "parameters" else f"{name}/mean"
    told = rf"step_00000003; it has 1 of [0-9,]+ values of {group} {shown} that are NaN or infinite; .*\.$"
    with pytest.raises(ConfigError, match=told):
        read_state(
            run.folder,
            parameters=run.parameters,
            state=run.state,
            place=run.runtime.place,
            max_held_bytes=max_held_bytes,
        )
