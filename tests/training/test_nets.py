"""The nets under checkpoints: each way in which a save can be wrong (mutants.py) is found by `task=resume_check`.

A save that blocks training is compared with the live model by itself (checkpoint/proof.py); a save in the background is
seen only by a resume from it, which is the first that the check makes.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.training.runs import REPOSITORY
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.tasks.resume_check import children as lives_of
from tpu_experiments.tasks.resume_check import plan_kills, shortened
from tpu_experiments.tasks.resume_check.children import KILLED, WHOLE, Children, Life, LifeFailed
from tpu_experiments.tasks.resume_check.compare import compare

GIVEN = (
    "model=qwen05b",
    "data=[sample_text]",
    "curriculum=single",
    "lora=all_linear_r8",
    "debug=smoke",
    "hw.runtime=eager",
    "trainer.eval_every_steps=0",
    "sample.max_new_tokens=0",
    "name=mine",
)


@dataclass
class Bench:
    """A run that nothing interrupts, and what is beside it."""

    config: Config
    place: Path
    whole: Life
    command: pytest.MonkeyPatch

    def children(self, place: Path, *, trainer: str | None) -> Children:
        """Lives with a trainer of mutants.py."""
        chosen = [f"trainer._target_=tests.training.mutants.{trainer}", "plugins=[tests.training.mutants]"]
        self.command.setattr(sys, "argv", ["run.py", *GIVEN, *(chosen if trainer else [])])
        return Children(self.config, place=str(place), witness=place)

    def differences(self, trainer: str, *, place: Path) -> dict[str, str]:
        """What differs, by the name of the check, where a mutant is killed behind its background save and resumed."""
        children, kill = self.children(place, trainer=trainer), plan_kills(self.config, resolve_stages(self.config))[0]
        (place / WHOLE).symlink_to(self.place / WHOLE)
        lives = [children.run_process(KILLED, kill=kill), children.run_process(KILLED)]
        assert lives[0].was_in_background
        assert lives[1].resume_step == kill.checkpoint
        verdict = compare([self.whole, *lives], place=str(place))
        return {check.name: check.difference for check in verdict.checks if check.difference}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    place = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as command:
        command.chdir(REPOSITORY)
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
            command.delenv(name, raising=False)
        config = shortened(composed(*GIVEN, "task=resume_check", f"output_dir={place}"))
        bench = Bench(config, place, Life(WHOLE, None, 0.0), command)
        bench.whole = bench.children(place, trainer=None).run_process(WHOLE)
        yield bench


def test_the_first_kill_resumes_from_a_background_save_inside_a_log_window(bench):
    kill = plan_kills(bench.config, resolve_stages(bench.config))[0]
    assert kill.is_second_save
    assert kill.checkpoint % lives_of.LOG_EVERY_STEPS != 0


@pytest.mark.parametrize(
    ("trainer", "found"),
    [
        pytest.param("ZeroOptimizer", "optimizer state, last checkpoint", marks=pytest.mark.slow),
        pytest.param("StaleParameters", "trained weights as exported", marks=pytest.mark.slow),
        pytest.param("LostWindow", "losses", marks=pytest.mark.slow),
        pytest.param("NoCopy", "trained weights as exported", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_background_save_is_found(bench, tmp_path, trainer, found):
    differences = bench.differences(trainer, place=tmp_path)
    assert found in differences
    assert "rows (source:row)" not in differences
    assert "resumes from the newest checkpoint" not in differences
    if trainer == "LostWindow":
        assert list(differences) == ["losses"]
        assert "step 6: " in differences["losses"]


@pytest.mark.slow
def test_a_background_save_that_is_a_step_back_is_found(bench, tmp_path):
    """The resumed life reads a place where no run is."""
    with pytest.raises(LifeFailed) as caught:
        bench.differences("StageStepBack", place=tmp_path)
    text = str(caught.value)
    assert "is refused when it resumes from its checkpoint: " in text
    assert "step_00000004/progress.json; stage_step=3, and the record of its stage has 4 steps" in text
