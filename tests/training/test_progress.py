"""The place in the run, from a checkpoint: what was written comes back; where no run is, is refused by its key."""

import copy
import json
from typing import Any

import pytest

from tests.checkpoint.saved import save_checkpoint
from tpu_experiments.checkpoint.progress import AnswersRecord, GuardState, Progress, StageRecord
from tpu_experiments.checkpoint.state import newest_parameters, read_state
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import strict_json

STAGES = {"text": 6, "chat": 4}


def inside() -> Progress:
    """After two steps of the second stage."""
    return Progress(
        stage=1,
        stage_step=2,
        step=8,
        peak_lr=1e-3,
        stages=[
            StageRecord("text", steps=6, tokens=300, first_train_loss=9.0, eval_loss=8.0, eval_sources={"a": 8.0}),
            StageRecord("chat", steps=2, tokens=70, held_step=7),
        ],
        eval_loss_before=9.5,
        eval_sources_before={"a": 9.5},
        eval_source_measures_before={"a": {"accuracy": 0.1}},
        eval_loss=8.5,
        eval_step=7,
        sample_before="Ce",
        skill_before={"one": AnswersRecord(asked=4, right=1, whole=0, shown=["Da. Da."])},
        open_losses=[(7, 8.25), (8, 8.125)],
        data={"a@64": "c05d80b015754c3e"},
        guard=GuardState(seen=8, spikes=[7], recent=[8.25, 8.125], passed_over=[[3, 4]]),
        canary={"equal": True},
    )


def written(progress: Progress) -> dict[str, Any]:
    """As storage has it."""
    values: dict[str, Any] = json.loads(strict_json.dumps(progress.to_dict()))
    return values


def test_what_was_written_comes_back():
    found = Progress.from_dict(written(inside()))
    assert found == inside()
    found.require_stages(STAGES)
    assert Progress.from_dict(written(Progress())) == Progress()


@pytest.mark.parametrize(
    "place",
    [
        Progress(stage=1, step=6, stages=[StageRecord("text", steps=6)]),
        Progress(stage=1, step=6, stages=[StageRecord("text", steps=6), StageRecord("chat")]),
        Progress(stage=2, step=9, stages=[StageRecord("text", steps=6), StageRecord("chat", steps=3, ended_by="x")]),
        Progress(stage_step=6, step=6, stages=[StageRecord("text", steps=6)]),
    ],
    ids=["border", "left before its first step", "ended by its exit test", "stopped behind the last step"],
)
def test_places_where_a_run_can_be(place):
    Progress.from_dict(written(place)).require_stages(STAGES)


def test_the_steps_of_a_range_are_left_out_of_the_stage_they_are_in():
    """Steps of a range are counted from 1 over the run, those of a stage from 0; what is done is not left out again."""
    progress = inside()
    progress.guard.passed_over = [[3, 4], [7, 8], [10, 11], [12, 20]]
    assert progress.skipped_steps(4) == {3}
    progress.stage, progress.stage_step, progress.step = 0, 2, 2
    assert progress.skipped_steps(6) == {2, 3}
    progress.guard.passed_over = []
    assert progress.skipped_steps(6) == set()


def test_a_loss_that_is_no_number_comes_back_as_none():
    """Strict JSON has null for it (a diverged run's evaluation)."""
    progress = inside()
    progress.stages[0].eval_sources["b"] = float("nan")
    progress.eval_loss = float("nan")
    found = Progress.from_dict(written(progress))
    assert found.stages[0].eval_sources["b"] != found.stages[0].eval_sources["b"]
    assert found.eval_loss is None


IMPOSSIBLE: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "stage 99": ([("stage", 99)], "stage=99, and there are records of 2 stages"),
    "stage_step 10^9": ([("stage_step", 10**9)], "stage_step=1000000000, and the record of its stage has 2 steps"),
    "stage_step 10^9 everywhere": (
        [("stage_step", 10**9), ("stages", 1, "steps", 10**9), ("step", 10**9 + 6)],
        "stages[1].steps=1000000000, and stage chat has 4 steps",
    ),
    "a step back": ([("stage_step", 1)], "stage_step=1, and the record of its stage has 2 steps"),
    "below 0": ([("stage_step", -1), ("stages", 1, "steps", -1), ("step", 5)], "stage_step=-1 is below 0"),
    "stage below 0": ([("stage", -1)], "stage=-1 is below 0"),
    "tokens below 0": ([("stages", 0, "tokens", -7)], "stages[0].tokens=-7 is below 0"),
    "another step": ([("step", 9)], "step=9, and the steps of its stages are 8 together"),
    "text": ([("stage_step", "2")], "stage_step='2' is of another type"),
    "a fraction": ([("stage_step", 2.0)], "stage_step='2.0' is of another type"),
    "true": ([("stage", True)], "stage='True' is of another type"),
    "nothing": ([("step", None)], "step='None' is of another type"),
    "a list of stages": ([("stages", {})], "stages='{}' is of another type"),
    "a stage that is none": ([("stages", 0, 7)], "stages[0]='7' is of another type"),
    "a stage without a name": ([("stages", 0, {"steps": 8})], "stages[0]="),
    "a rate": ([("peak_lr", -1.0)], "peak_lr=-1.0 is no learning rate"),
    "an endless rate": ([("peak_lr", float("inf"))], "peak_lr=inf is no learning rate"),
    "a huge number": ([("peak_lr", 10**400)], "peak_lr='1000"),
    "an evaluation to come": ([("eval_step", 9)], "eval_step=9, and step=8"),
    "losses to come": ([("open_losses", [[9, 1.0]])], "open_losses has 1.0 of step 9, and step=8"),
    "losses that are none": ([("open_losses", [[8, None]])], "open_losses has nan of step 8"),
    "losses by threes": ([("open_losses", [[8, 1.0, 2]])], "open_losses[0]='[8, 1.0, 2]' is of another type"),
    "hashes": ([("data", [])], "data='[]' is of another type"),
    "the guard": ([("guard", "seen", "all")], "guard.seen='all' is of another type"),
    "another key": ([("colour", "red")], "colour is no key of it"),
    "another key of a stage": ([("stages", 0, "colour", 1)], "stages[0].colour is no key of it"),
    "another curriculum": ([("stages", 0, "name", "code")], "stages[0].name='code', and the curriculum has text there"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_place_where_no_run_is_is_refused_by_its_key(tmp_path, case):
    """Checksums are right: this is what a program has written, and not this one."""
    changes, told = IMPOSSIBLE[case]
    values = written(inside())
    for *path, last, value in copy.deepcopy(changes):
        target: Any = values
        for part in path:
            target = target[part]
        target[last] = value
    step = values["step"] if type(values["step"]) is int and values["step"] >= 0 else 8
    folder = str(tmp_path)
    target = save_checkpoint(folder, step=step, groups={}, progress=values, keep_last=1)
    if case in ("an endless rate", "a huge number"):  # strict JSON writes neither
        with pytest.raises(ValueError, match="peak_lr"):
            Progress.from_dict(values)
        return
    with pytest.raises(ConfigError) as caught:
        read_state(folder, parameters={}, state={}, place=lambda tensor, name: tensor, stages=STAGES)
    text = str(caught.value)
    assert text.startswith(f"{target}/progress.json; ")
    assert told in text or (case == "nothing" and "it says step='None', unlike its folder's name" in text)
    assert text.endswith(".")
    assert "\n" not in text


def test_a_step_unlike_the_folder_s_is_refused(tmp_path):
    save_checkpoint(str(tmp_path), step=4, groups={}, progress=written(inside()), keep_last=1)
    for read in (
        lambda folder: newest_parameters(folder, max_held_bytes=0),
        lambda folder: read_state(folder, parameters={}, state={}, place=lambda tensor, name: tensor),
    ):
        with pytest.raises(ConfigError, match=r"step_00000004/progress\.json; it says step='8', unlike its folder"):
            read(str(tmp_path))


@pytest.mark.parametrize("key", ["stage", "stage_step", "step", "stages", "data"])
def test_a_place_that_is_not_said_is_refused(key):
    values = written(inside())
    del values[key]
    with pytest.raises(ValueError, match=f"it lacks {key}$"):
        Progress.from_dict(values)
