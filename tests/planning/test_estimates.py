"""What a plan promises of a run, and how result.json holds it against what the run measured."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.plan_estimates import Measured, PlanEstimates, compared_with_plan, plan_line
from tpu_experiments.planning.analytic import estimated_time
from tpu_experiments.planning.estimates import NOT_ALL, estimates_of
from tpu_experiments.planning.stored_plans import programs_key

TWO_SHAPES = (
    "hw=v5e8",
    "trainer.global_batch_rows=32",
    "trainer.micro_batch_rows=2",
    "curriculum.stages.chat.seq_len=64",
)
MEASURED = Measured({"text": 6, "chat": 2}, {"text": 4096, "chat": 2048}, 10.0, 1.5, 30.0, num_devices=8)


def store(config: Config, *, missing: str = "", **changes: Any) -> Path:
    """A compiled plan with a program for every shape of these stages, all compiled but `missing`."""
    rows = 2 * (1 if config.hw.parallel == "spawn" else 8)
    programs = [
        {"name": "train", "shape": f"2 x {rows} x 128", "compile_seconds": 20.0, "estimated_seconds": 0.5},
        {"name": "train", "shape": f"2 x {rows} x 64", "compile_seconds": 15.0, "estimated_seconds": 0.25},
        {"name": "eval", "shape": f"{rows} x 128", "compile_seconds": 5.0, "estimated_seconds": 0.1},
    ]
    for program in programs:
        program["compile_seconds"] = None if program["name"] == missing else program["compile_seconds"]
    fields = {"method": "compiled", "fits": True, "programs": programs, "compile_seconds": 40.0}
    fields |= {"hbm_gib_per_chip": {"arguments": 2.0, "total": 9.0}}
    fields |= {"programs_key": programs_key(config, config.model.arch, resolve_stages(config))}
    file = Path(config.output_dir) / "plans" / "p" / "plan.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(fields | changes))
    return file


@pytest.mark.parametrize("parallel", ["spmd", "spawn"])
def test_a_compiled_plan_tells_the_time_of_every_stage(tmp_path: Path, parallel: str) -> None:
    config = composed(*TWO_SHAPES, f"hw.parallel={parallel}", f"output_dir={tmp_path}")
    file = store(config)
    assert asdict(estimates_of(config, resolve_stages(config))) == {
        "source": "compiled",
        "file": str(file),
        "step_seconds": {"text": 0.5, "chat": 0.25},
        "hbm_gib": 2.0,
        "compile_seconds": 40.0,
        "reason": "",
        "compile_reason": "",
        "tuned": None,
    }


def test_a_plan_of_the_training_alone_promises_no_compile_seconds(tmp_path: Path) -> None:
    config = composed(*TWO_SHAPES, f"output_dir={tmp_path}")
    store(config, missing="eval", fits=False)
    found = estimates_of(config, resolve_stages(config))
    assert (found.compile_seconds, found.compile_reason) == (None, NOT_ALL)
    assert found.reason == "by the plan the run does not fit"


def test_without_a_compiled_plan_the_formulas_promise(tmp_path: Path) -> None:
    config = composed(*TWO_SHAPES, f"output_dir={tmp_path}")
    found = estimates_of(config, resolve_stages(config))
    assert (found.source, found.file, found.compile_seconds) == ("analytic", None, None)
    text, chat = (estimated_time(config, config.model.arch, geometry=s.geometry) for s in resolve_stages(config))
    assert found.step_seconds == {"text": text.total_s, "chat": chat.total_s}
    assert found.hbm_gib is not None
    assert 0 < found.hbm_gib < 0.1
    assert estimates_of(composed("hw=cpu"), []) == PlanEstimates(reason="hw=cpu names no chip and topology to plan for")


def test_a_mean_step_is_held_against_the_steps_that_were_done() -> None:
    estimates = PlanEstimates("compiled", "plan.json", {"text": 0.5, "chat": 0.25, "other": 9.0}, 2.0, 40.0)
    assert compared_with_plan(estimates, MEASURED) == {
        "source": "compiled",
        "file": "plan.json",
        "reason": None,
        "step_seconds": {"planned": 3.5 / 8, "measured": 10 / 8, "ratio": 10 / 3.5, "reason": None},
        "tokens_per_second_per_chip": {
            "planned": 28_672 / 3.5 / 8,
            "measured": 28_672 / 10 / 8,
            "ratio": pytest.approx(3.5 / 10),
            "reason": None,
        },
        "hbm_gib": {"planned": 2.0, "measured": 1.5, "ratio": 0.75, "reason": None},
        "compile_seconds": {"planned": 40.0, "measured": 30.0, "ratio": 0.75, "reason": None},
    }
    [line] = plan_line(compared_with_plan(estimates, MEASURED))
    assert line == "  planned         0.438 s a step (compiled), measured 1.25: 2.86 times as long"


def test_what_is_not_known_is_null_with_a_reason() -> None:
    nothing = compared_with_plan(PlanEstimates(reason="there is no plan"), MEASURED)
    figures = ("step_seconds", "tokens_per_second_per_chip", "hbm_gib", "compile_seconds")
    assert {nothing[name]["reason"] for name in figures} == {nothing["reason"]} == {"there is no plan"}
    assert {nothing[name]["ratio"] for name in figures} == {nothing["source"]} == {None}
    assert nothing["step_seconds"]["measured"] == 10 / 8
    estimates = PlanEstimates("analytic", None, {"text": 0.5, "chat": 0.25}, 2.0, None, compile_reason="not compiled")
    silent = compared_with_plan(estimates, replace(MEASURED, hbm_gib=None))
    assert silent["hbm_gib"] == {
        "planned": 2.0,
        "measured": None,
        "ratio": None,
        "reason": "the device does not report its memory",
    }
    assert silent["compile_seconds"]["reason"] == "not compiled"
    idle = compared_with_plan(estimates, replace(MEASURED, steps={}, train_seconds=None))
    assert idle["step_seconds"]["reason"] == "no step was trained since the last start"
    part = compared_with_plan(replace(estimates, step_seconds={"text": 0.5}), MEASURED)
    assert part["step_seconds"]["reason"] == "the plan has no time of a stage of this run"
    assert plan_line(part) == plan_line(idle) == plan_line(None) == []
