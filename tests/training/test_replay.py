"""Whole runs whose steps mostly run an earlier trace: the numbers of a run that traces every step, bit for bit."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import finished, records

pytestmark = pytest.mark.xla
COMMON = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "debug=smoke",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "trainer.max_stage_steps=12",
    "trainer.log_every_steps=1",
    "trainer.eval_every_steps=5",
    "name=replay",
)
MODES = {
    "inline_accumulated": ("trainer.micro_batch_rows=2",),
    "spmd_4": ("hw.parallel=spmd", "hw.num_devices=4"),
}


SHORT = ("trainer.log_every_steps=1", "trainer.eval_every_steps=0", "sample.max_new_tokens=0", "name=replay")
PAIRS = (
    *("model=tiny", "objective=dpo", "data=stories_pairs_ro", "trainer.seq_len=128", "trainer.max_stage_steps=6"),
    *(f"~data.stories_pairs_ro.questions.{asked}" for asked in ("one_person", "several_persons")),
)
ANSWERS = (
    *("model=tiny", "objective=grpo", "data=[sample_chat]", "lora=all_linear_r8", "curriculum.stages.main.steps=8"),
    *("rollout.prompts=2", "rollout.samples=4", "rollout.max_new_tokens=6", "trainer.seq_len=128", "optim.lr=1e-2"),
    *("reward=length", "rollout.rewards.length.arguments.most=2", "trainer.max_eval_rows=4"),
)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Every logged value that is no clock."""
    return [
        {k: v for k, v in r.items() if not k.startswith(("perf/", "goodput/")) and k != "time"} for r in records(folder)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [MODES["inline_accumulated"], MODES["spmd_4"]],
    ids=["inline_accumulated", "spmd_4"],
)
def test_two_stages_with_evaluations_are_those_of_a_run_that_traces_every_step(tmp_path, mode):
    every, some = tmp_path / "every", tmp_path / "some"
    one = finished(*COMMON, *mode, "trainer.trace_every_steps=1", output_dir=every)
    other = finished(*COMMON, *mode, "trainer.trace_every_steps=6", output_dir=some)
    assert len([r for r in records(some) if "train/loss" in r]) == 24
    assert numbers(some) == numbers(every)
    assert other["eval_loss"] == one["eval_loss"]
    assert other["num_compiles"] == one["num_compiles"]
    assert one["compiles_after_warmup"] == other["compiles_after_warmup"] == 0
    adapters = [(folder / "replay" / "adapter" / "adapter_model.safetensors").read_bytes() for folder in (every, some)]
    assert adapters[0] == adapters[1]
    logs = [(folder / "replay" / "run.log").read_text() for folder in (every, some)]
    assert ["from now on one call in 6 on average is traced" in log for log in logs] == [False, True]


@pytest.mark.parametrize(
    ("words", "programs"),
    [
        pytest.param(PAIRS, {"train"}, id="preferences"),
        pytest.param(ANSWERS, {"train", "merge", "read", "write"}, id="answers", marks=pytest.mark.slow),
    ],
)
def test_steps_that_report_measures_and_programs_that_take_turns_are_replayed(tmp_path, words, programs):
    """Nothing of a step but its results may be alive behind it, or it is traced every time, without a word."""
    every, some = tmp_path / "every", tmp_path / "some"
    finished(*words, *SHORT, "trainer.trace_every_steps=1", output_dir=every, as_typed=True)
    finished(*words, *SHORT, "trainer.trace_every_steps=50", output_dir=some, as_typed=True)
    assert numbers(some) == numbers(every)
    log = (some / "replay" / "run.log").read_text()
    replayed = re.findall(r"(\w+)[ \d]*: from now on one call in 50", log)
    assert programs <= set(replayed)
