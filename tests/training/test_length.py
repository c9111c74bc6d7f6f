"""A finished run is given more steps where those that are done stay what they are, else told what to do instead."""

import json

import pytest
import torch

from tests.checkpoint.saved import save_checkpoint
from tests.training.runs import finished, records, run
from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity, is_of_other_length
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.tasks.setup import make_inputs, set_up
from tpu_experiments.training.length import new_length

pytestmark = pytest.mark.xla
SMALL = (
    "hw.runtime=eager",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=8",
    "trainer.log_every_steps=2",
    "trainer.eval_every_steps=0",
    "trainer.max_eval_rows=8",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "sample.max_new_tokens=0",
    "curriculum.stages.text.steps=2",
    "curriculum.stages.chat.steps=4",
    "schedule.warmup_steps=1",
)
LONGER = "curriculum.stages.chat.steps=8"


def adapter(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def refusal(make_config, tmp_path):
    """What a command of other words is told about the run in this folder."""

    def ask(*words):
        config = make_config(*words, f"output_dir={tmp_path}")
        with pytest.raises(ConfigError) as caught:
            set_up(config, open_run(config, may_lengthen=True))
        return str(caught.value)

    return ask


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "back"), [("constant", 6), ("wsd", 4)])
def test_the_longer_run_is_the_run_of_that_length(tmp_path, schedule, back):
    """Of wsd the last half of its stage decays: it goes on from the checkpoint before."""
    words = (*SMALL, f"schedule={schedule}", "schedule.decay_fraction=0.5", "name=run")
    whole = finished(*words, LONGER, output_dir=tmp_path / "whole")
    short = finished(*words, output_dir=tmp_path / "parts")
    folder = tmp_path / "parts" / "run"
    at_its_end = adapter(folder)
    longer = finished(*words, LONGER, output_dir=tmp_path / "parts")
    assert adapter(folder) == adapter(tmp_path / "whole" / "run") != at_its_end
    assert longer["eval_loss"] == whole["eval_loss"]
    assert longer["eval_loss_before"] == short["eval_loss_before"]
    assert [stage["steps"] for stage in longer["stages"]] == [2, 8]
    assert longer["stages"][1]["epochs"] == whole["stages"][1]["epochs"]
    assert json.loads((folder / "result_of_step_00000006.json").read_text()) == short
    assert f"name=run has 10 steps now; it resumes from its checkpoint of step {back}" in (
        folder / "run.log"
    ).read_text(encoding="utf-8")
    # Each step once, and the record at the old end stays.
    steps = [record["step"] for record in records(tmp_path / "parts") if "train/loss" in record]
    assert steps == [2, 4, 6, 8, 10]
    told = run(*words, LONGER, output_dir=tmp_path / "parts")
    assert "name=run was finished before; nothing was run." in told.stdout


def test_what_depends_on_the_length_is_refused_with_the_way_on(refusal, tmp_path):
    finished(*SMALL, "name=run", output_dir=tmp_path)
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    cosine = refusal(*SMALL, "name=run", LONGER)
    assert cosine.startswith(f"name=run; {folder} was made with curriculum.stages.chat.steps=4, now 8; ")
    assert "(stage chat, step 3 of it: its learning rate was 0.00275 in 4 steps and would be 0.004699 in 8" in cosine
    assert cosine.endswith(f"restore the values, or train on from it under another name: start.run={folder}.")
    assert "are fewer in one of its stages" in refusal(*SMALL, "name=run", "curriculum.stages.chat.steps=3")
    earlier = ("curriculum.stages.text.steps=4", "curriculum.stages.text.schedule.name=constant")
    assert "(the stage after text has begun)" in refusal(*SMALL, "name=run", *earlier)
    assert "lora.r=8, now 4" in refusal(*SMALL, "name=run", LONGER, "lora.r=4")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"ended_by": "loss 2 is at most 3"}, "loss 2 is at most 3"),
        ({"restored_step": 4}, "it ended with step 4, its best"),
        ({"ended_by": "patience is over", "restored_step": 4}, "patience is over"),
    ],
)
def test_a_run_that_did_not_end_with_its_last_step_is_refused(make_config, tmp_path, end, reason):
    words = (*SMALL, "schedule=constant", "name=run", f"output_dir={tmp_path}")
    config = make_config(*words)
    folder = open_run(config)
    folder.create(config)
    stages = [StageRecord("text", steps=2), StageRecord("chat", steps=3, **end)]
    progress = Progress(stage=2, step=5, stages=stages).to_dict()
    groups = {"parameters": {"a": torch.zeros(1)}}
    save_checkpoint(folder.path("checkpoints"), step=5, groups=groups, progress=progress, keep_last=9)
    config = make_config(*words, LONGER)
    with pytest.raises(ConfigError) as caught:
        new_length(folder, make_inputs(config, resolve_stages(config)), config)
    assert f"(stage chat did not end with its last step: {reason})" in str(caught.value)


@pytest.mark.parametrize("inside", [False, True], ids=["between stages", "in the last"])
def test_a_run_that_a_callback_ended_early_is_refused(make_config, tmp_path, inside):
    words = (*SMALL, "schedule=constant", "name=run", f"output_dir={tmp_path}")
    config = make_config(*words)
    folder = open_run(config)
    folder.create(config)
    why = "callbacks.limit: 6 hours have reached hours=6"
    stages = [StageRecord("text", steps=2), *([StageRecord("chat", steps=3, ended_by=why)] if inside else [])]
    step = sum(stage.steps for stage in stages)
    progress = Progress(stage=1, stage_step=step - 2, step=step, stages=stages, ended_by=why).to_dict()
    groups = {"parameters": {"a": torch.zeros(1)}}
    save_checkpoint(folder.path("checkpoints"), step=step, groups=groups, progress=progress, keep_last=9)
    config = make_config(*words, LONGER)
    with pytest.raises(ConfigError) as caught:
        new_length(folder, make_inputs(config, resolve_stages(config)), config)
    where = "chat, 2 of 2" if inside else "text, 1 of 2"
    assert f"(the run was ended in stage {where}: {why})" in str(caught.value)


@pytest.mark.slow
def test_a_batch_that_ended_an_epoch_with_padding_is_no_batch_of_a_longer_run(refusal, tmp_path):
    words = ("name=run", "schedule=constant", "schedule.warmup_steps=0", "data=sample_text", "curriculum=single")
    words += (*(word for word in SMALL if not word.startswith(("curriculum.", "schedule."))),)
    words += ("trainer.global_batch_rows=100",)
    finished(*words, "curriculum.stages.main.epochs=1", output_dir=tmp_path)
    more = refusal(*words, "curriculum.stages.main.epochs=2")
    assert "its batch was filled up with padding at the end of the epochs, and would have rows of the next" in more


def test_only_lengths_and_schedules_make_another_length(make_config):
    before = identity(make_config("name=x"))
    for word, expected in (
        ("trainer.max_stage_steps=4", True),
        ("curriculum.stages.text.epochs=2", True),
        ("data.sample_text.epochs=7", True),
        ("schedule=constant", True),
        ("curriculum.stages.text.lr=1e-3", False),
        ("curriculum.stages.text.exit.patience=3", False),
        ("seed=1", False),
        ("hw.num_threads=2", False),
    ):
        more = ("trainer.eval_every_steps=1",) if "patience" in word else ()
        assert is_of_other_length(before, make_config("name=x", word, *more)) is expected, word
