"""task=resume_check: it kills, resumes and compares for real, finds what differs, refuses what it cannot check."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.runs import run
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks.resume_check import MIN_STEPS, clear_place, kills_inside, plan_kills, shortened
from tpu_experiments.tasks.resume_check import run as check
from tpu_experiments.tasks.resume_check.children import LOG_EVERY_STEPS, Kill, Life, user_overrides
from tpu_experiments.tasks.resume_check.compare import (
    check_once,
    check_position,
    check_records,
    check_results,
    check_rows,
    check_tensors,
)

SMALL = ("model=qwen05b", "data=[sample_text,sample_chat]", "lora=all_linear_r8", "debug=smoke", "name=mine")


@pytest.mark.slow
def test_a_run_is_killed_resumed_and_equal(tmp_path):
    overrides = (*SMALL, "task=resume_check", "hw.runtime=eager", "lora.dropout=0.1", "logger=[console,tensorboard]")
    begun = ("optim.ema=0.9", "curriculum.stages.chat.optimizer=fresh")
    done = run(*overrides, *begun, "sample.max_new_tokens=0", "checkpoint.keep_last=9", output_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    place = tmp_path / "resume_check" / "mine"
    found = json.loads((place / "resume_check.json").read_text())
    assert found["equal"]
    assert found["steps"] == 12
    assert [check["name"] for check in found["checks"] if not check["equal"]] == []
    resumes = [(r["killed_after_step"], r["resumed_from_step"]) for r in found["resumes"]]
    assert resumes == [(6, 4), (6, 5), (9, 6), (9, 8)]
    assert [r["checkpoint_was_in_background"] for r in found["resumes"]] == [True, False, False, False]
    folders = {step: place / "killed" / "checkpoints" / f"step_{step:08d}" for step in (4, 5, 6)}
    proofs = {step: json.loads((folder / "COMMIT.json").read_text())["proof"] for step, folder in folders.items()}
    answered = [step for step, proof in proofs.items() if "answer" in proof]
    assert answered == [5, 6], "the model answers to a save in front of the loop, not to one in the background"
    opened = {
        step: json.loads((folder / "progress.json").read_text())["open_losses"] for step, folder in folders.items()
    }
    assert {step: [done for done, _ in losses] for step, losses in opened.items()} == {4: [4], 5: [4, 5], 6: []}
    assert all(r["bytes_read"] > 0 and r["seconds_to_first_step"] > 0 for r in found["resumes"])
    assert done.stdout.count(" equal ") == len(found["checks"])
    assert {path.name for path in place.iterdir()} == {"whole", "killed", "resume_check.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"prepared", "resume_check"}, "no run of the user's own"


ROWS = {1: ["a:1", "a:2"], 2: ["a:3", "a:4"], 3: ["b:1", "b:2"], 4: ["b:3", "a:5"]}
KILL = Kill(checkpoint=2, after=3, where="inside stage text", every_steps=1)


def lives() -> tuple[Life, Life, Life]:
    """A whole run, and one that was killed after step 3 and resumed from step 2."""
    uninterrupted = Life("whole", None, 0.0, rows=ROWS)
    before = Life("killed", KILL, 0.0, rows={step: ROWS[step] for step in (1, 2, 3)}, checkpoint_after=2)
    after = Life("killed", None, 0.0, resume_step=2, rows={step: ROWS[step] for step in (3, 4)})
    return uninterrupted, before, after


def test_rows_that_were_skipped_repeated_or_others_are_named():
    uninterrupted, before, after = lives()
    assert check_rows(uninterrupted, [before, after]).difference == ""
    assert check_position([before, after]).difference == ""
    other = replace(after, rows={3: ["b:1", "b:9"], 4: ROWS[4]})
    assert (
        "step 3 took b:1, b:9; uninterrupted it took b:1, b:2" in check_rows(uninterrupted, [before, other]).difference
    )
    skipping = replace(after, rows={4: ROWS[4]})
    assert "its first step was 4" in check_position([before, skipping]).difference
    assert check_rows(uninterrupted, [before, replace(after, rows={})]).difference == "step 4 was skipped"
    assert "it went on from 1" in check_position([before, replace(after, resume_step=1)]).difference


def test_values_that_differ_are_named():
    assert check_records("losses", {1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.25}).difference == ""
    assert "step 2: 0.25 uninterrupted, None resumed" in check_records("losses", {1: 0.5, 2: 0.25}, {1: 0.5}).difference
    ulp = 0.25 + 2**-54
    assert "step 2" in check_records("losses", {2: 0.25}, {2: ulp}).difference
    assert check_once([{"step": 1}, {"step": 2}, {"step": 2}]).difference == "step 2 occurs 2 times"
    result = {"eval_loss_before": 2.0, "eval_loss": 1.0, "tokens": 9, "sample_before": None, "sample_after": "a"}
    assert check_results(result, result).difference == ""
    assert "tokens: 9 uninterrupted, 8 resumed" in check_results(result, result | {"tokens": 8}).difference


def test_one_bit_of_a_tensor_is_found(tmp_path):
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(7, dtype=torch.int32)}
        save_file(tensors, folder / "optimizer.safetensors")
    paths = [str(folder) for folder in folders]
    assert check_tensors("optimizer", *paths).difference == ""
    assert "files none" in check_tensors("weights", *paths, chosen=lambda name: "optimizer" not in name).difference
    tensors["a"][1] = -1.0
    save_file(tensors, folders[1] / "optimizer.safetensors")
    assert check_tensors("optimizer", *paths).difference == "a and 0 more of optimizer.safetensors"


def test_stages_are_cut_and_too_short_ones_refused(make_config, tmp_path):
    common = (*SMALL, "task=resume_check", f"output_dir={tmp_path}")
    config = shortened(make_config(*common, "task.steps=8", "trainer.max_stage_steps=null"))
    kills = plan_kills(config, resolve_stages(config))
    assert [(kill.checkpoint, kill.after) for kill in kills] == [(4, 5), (5, 6), (8, 9), (10, 11)]
    one_stage = (*common, "curriculum=single", "curriculum.stages.main.steps=5")
    config = shortened(make_config(*one_stage))
    kills = plan_kills(config, resolve_stages(config))
    assert [(kill.checkpoint, kill.after) for kill in kills] == [(2, 3), (3, 4)]
    short = shortened(make_config(*common, "curriculum.stages.text.steps=3"))
    with pytest.raises(ConfigError, match=r"stage text has 3 steps .* takes 4; give it more") as error:
        plan_kills(short, resolve_stages(short))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("steps", range(MIN_STEPS, 60))
def test_each_kill_comes_at_a_record_between_its_checkpoint_and_the_next_save(steps):
    """By the rules of the trainer: a record every third step and at the stage's end, saves by steps but at its end."""
    start = 0
    for kill, number in zip(kills_inside(steps, where=""), (2, 1), strict=True):
        saves = [step for step in range(start + 1, steps) if step % kill.every_steps == 0]
        records = [step for step in range(start + 1, steps + 1) if step % LOG_EVERY_STEPS == 0 or step == steps]
        killed = min(step for step in records if step >= kill.after)
        assert [step for step in saves if step < killed] == saves[:number]
        assert saves[number - 1] == kill.checkpoint
        assert kill.is_second_save == (number == 2)
        assert not kill.is_second_save or kill.checkpoint % LOG_EVERY_STEPS
        start = kill.checkpoint


def test_a_place_of_one_process_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"output_dir=memory://x; .* use a local folder or gs://") as error:
        check(make_config(*SMALL, "task=resume_check", "output_dir=memory://x"))
    assert "\n" not in str(error.value)


def test_a_place_with_other_files_is_left_alone(make_config, tmp_path):
    config = make_config(*SMALL, "task=resume_check", f"output_dir={tmp_path}")
    place = Path(clear_place(config))
    (place / "whole").mkdir()
    assert clear_place(config) == str(place)
    assert list(place.iterdir()) == []
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, which no check wrote"):
        clear_place(config)
    assert (place / "notes.txt").read_text() == "mine"


def test_the_users_command_line_is_kept_but_for_what_the_check_decides():
    given = [
        "model=tiny",
        "task=resume_check",
        "task.steps=8",
        "name=a",
        "+x.y=1",
        "~logger.wandb",
        "output_dir=o",
        "-m",
    ]
    assert user_overrides(given) == ["model=tiny", "+x.y=1", "~logger.wandb"]
