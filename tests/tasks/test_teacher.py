"""task=prepare task.teacher=: what is written, mended and refused, from vLLM's answers, without a device."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.teacher import LEAST_LOGP, LOGPS
from tpu_experiments.storage.run_folder import RunFolder, open_run
from tpu_experiments.tasks.evaluate.subject import Subject
from tpu_experiments.tasks.prepare.teacher import Order, _is_there, _require_room, _told, teacher_of, write_predictions
from tpu_experiments.training.batches import (
    RunInputs,
    load_run_tokenizer,
    prepare_sources,
    stages_with_data,
    stored_teachers,
)

WORDS = ("objective=distillation", "objective.top_k=2", "curriculum=single", "data=stories_ro", "data_size=sample")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Predictions of a file whose second entry is impossible, in the folder `t`, and the config that asks for them."""
    folder = tmp_path_factory.mktemp("teacher")
    words = (*WORDS, f"data.stories_ro.teacher={folder}/t", f"prepare.folder={folder}/p", "task=prepare")
    config = composed(*words, f"task.teacher_requests={folder}/asked.jsonl", f"task.teacher={folder}/scored.jsonl")
    inputs = inputs_of(config)
    write_predictions(replace(config, task=replace(config.task, teacher=None)), inputs, None)
    lines = []
    for line in (folder / "asked.jsonl").read_text().splitlines():
        ids = json.loads(line)["prompt_token_ids"]
        told = [None, *({"5": {"logprob": -0.5}, "6": {"logprob": float("-inf")}} for _ in ids[1:])]
        lines.append(json.dumps({"prompt_token_ids": ids, "prompt_logprobs": told}) + "\n")
    (folder / "scored.jsonl").write_text("".join(lines))
    write_predictions(config, inputs, None)
    return SimpleNamespace(folder=folder, config=config, inputs=inputs)


def inputs_of(config):
    tokenizer, stages = load_run_tokenizer(config), stages_with_data(config)
    return RunInputs(tokenizer, prepare_sources(config, tokenizer=tokenizer, stages=stages), stages)


def taught(written, config):
    tokenizer, sources, stages = written.inputs.tokenizer, written.inputs.sources, written.inputs.stages
    return stored_teachers(config, tokenizer=tokenizer, sources=sources, stages=stages)


def first_row(written, config):
    """Read a row of training, as a run does."""
    for (source, *split), each in taught(written, config).items():
        each.told(written.inputs.sources[source].store(*split)).take(slice(0, 1))


def test_what_is_impossible_is_stored_as_a_finite_number(written):
    """exp of it is 0, and 0 times minus infinity would be NaN in a loss."""
    found = taught(written, written.config)
    (key,) = (each for each in found if each[1] == "train")
    rows = found[key].told(written.inputs.sources[key[0]].store(*key[1:])).take(slice(0, 4))
    assert np.unique(rows.more[LOGPS]).tolist() == [LEAST_LOGP, -0.5, 0]
    assert np.exp(np.float32(LEAST_LOGP)) < 1e-40


def test_a_damaged_file_is_refused_by_training_and_mended_by_the_same_command(written, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = at(written.config, f"{tmp_path}/t")
    shutil.copytree(written.folder / "t", tmp_path / "t")
    whole = {file: file.read_bytes() for file in (tmp_path / "t").glob("*/*")}
    write_predictions(config, written.inputs, None)
    assert caplog.text.count("has these predictions already") == 2
    for name, content in [("00000.npy", None), ("00000.npy", b"\0"), ("manifest.json", b"\0")]:
        file = next((tmp_path / "t").glob(f"*-train/{name}"))
        if content is None:
            file.unlink()
        else:
            file.write_bytes(whole[file][:-9] + content + whole[file][-8:])
        with pytest.raises(ConfigError, match=f"{file}; "):
            first_row(written, config)
        write_predictions(config, written.inputs, None)
        assert {file: file.read_bytes() for file in (tmp_path / "t").glob("*/*")} == whole
    assert caplog.text.count("The predictions are written again.") == 2


def test_the_same_file_with_other_answers_is_another_teacher(written, tmp_path):
    shutil.copy(written.folder / "scored.jsonl", tmp_path / "scored.jsonl")
    before = _told(f"{tmp_path}/scored.jsonl", None)
    text = (tmp_path / "scored.jsonl").read_text()
    (tmp_path / "scored.jsonl").write_text(text.replace("-0.5", "-0.6"))
    assert len(text) == (tmp_path / "scored.jsonl").stat().st_size
    assert _told(f"{tmp_path}/scored.jsonl", None) != before


@pytest.mark.parametrize("words", [("model.revision=abc",), ("model.base=int8",), ("seed=2",)], ids=str)
def test_a_base_model_with_other_settings_is_another_teacher(words):
    settings = ("model=qwen05b", "model.init=random")
    one, other = (Subject(composed(*settings, *more), "base", "", "") for more in ((), words))
    assert _told("model", one) != _told("model", other)
    assert _told("model", one) == _told("model", Subject(composed(*settings, "hw.num_threads=3"), "base", "", ""))


def test_predictions_of_another_teacher_are_refused(written):
    with pytest.raises(ConfigError, match=r"it holds other predictions of a teacher \(teacher=.* there, b now\)"):
        _is_there(str(next((written.folder / "t").glob("*-train"))), {"teacher": "b"})


def test_predictions_in_a_bucket_are_cached_beside_local_rows(written, memory_copy):
    config = at(written.config, memory_copy)
    found = taught(written, config)
    assert {each.cache is not None for each in found.values()} == {True}
    assert {each.cache for each in taught(written, written.config).values()} == {None}


@pytest.fixture
def memory_copy(written):
    MemoryFileSystem().put(str(written.folder / "t"), "/teacher_copy", recursive=True)
    yield "memory://teacher_copy"
    MemoryFileSystem().rm("/teacher_copy", recursive=True)


def at(config, folder):
    return replace(config, data={name: replace(s, teacher=folder) for name, s in config.data.items()})


def test_several_problems_of_a_teacher_are_said_together(written):
    objective = replace(written.config.objective, top_k=3, temperature=2.0)
    with pytest.raises(ConfigError) as caught:
        taught(written, replace(written.config, objective=objective))
    assert ["objective.top_k=3" in line for line in str(caught.value).splitlines()] == [True, False]
    assert "objective.temperature=2 and it was written at 1" in str(caught.value)


def test_room_is_summed_over_the_folders_of_a_disk(written, tmp_path, monkeypatch):
    """One folder for training and one for evaluation, each within what is free, and both beyond it."""
    rows = {"train": 30, "evaluation": 20}
    keys = [("stories_ro", split, 64) for split in rows]
    for split in rows:
        (tmp_path / f"stories_ro-64-{split}").mkdir()
    about = {key: {"num_rows": rows[key[1]]} for key in keys}
    order = Order(written.inputs, keys, dict.fromkeys(keys, np.dtype([("x", np.void, 10**9)])), about, 9)
    config = at(written.config, str(tmp_path))
    for free, is_enough in ((50 * 10**9, True), (49 * 10**9, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if is_enough:
            _require_room(order, config)
            continue
        with pytest.raises(ConfigError, match=r"its predictions take 50\.0 GB and the disk of .* has 49\.0 GB free"):
            _require_room(order, config)


def test_a_run_without_config_or_weights_is_refused(tmp_path):
    run = composed("data=stories_ro", "name=r", f"output_dir={tmp_path}")
    open_run(run).create(run)
    config = composed(*WORDS, "data.stories_ro.teacher=t", "task=prepare", f"task.teacher={tmp_path}/r/")
    with pytest.raises(ConfigError, match=r"/r; the run is not finished .*, or name another run with task\.teacher=\."):
        teacher_of(config)
    Path(RunFolder.at(f"{tmp_path}/r").config_path).unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml; it cannot be read \(FileNotFoundError\); restore it"):
        teacher_of(config)


def test_a_folder_that_cannot_be_made_is_one_sentence(written, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/t"):
        write_predictions(at(written.config, f"{tmp_path}/file/t"), written.inputs, None)
