"""Whole runs whose steps mostly run an earlier trace: the numbers of a run that traces every step, bit for bit."""

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
