"""A run on its own answers that goes back: what is sampled anew, what is passed over, and what a kill there changes."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.training.runs import run
from tests.training.test_rl import EAGER, forget_after, logged, state, stored
from tpu_experiments.training.rollouts import RolloutStore

pytestmark = pytest.mark.slow
TRAINER = """
import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from tpu_experiments.training.rl import PolicyTrainer, RolloutRows

BAD = (8, 9)


class TroubledTrainer(PolicyTrainer):
    # The rows that steps 8 and 9 have at first are bad wherever they come up, and no others.
    def rows_of(self, found, stage, *, first):
        fed, size = super().rows_of(found, stage, first=first), len(found.advantage_N) // 2
        advantage_N = fed.rows.more["advantage"].copy()
        for part in range(2):
            rows = slice(part * size, (part + 1) * size)
            digest = hashlib.sha256(fed.rows.ids_NT[rows].tobytes()).hexdigest()
            mark = Path(os.environ["BAD_ROWS"]) / str(first + part + 1)
            if first + part + 1 in BAD and not mark.exists():
                mark.write_text(digest)
            if any(each.read_text() == digest for each in mark.parent.iterdir()):
                advantage_N[rows] = np.inf
        more = fed.rows.more | {"advantage": advantage_N}
        return RolloutRows(replace(fed.rows, more=more), fed.labels, fed.first)

    def roll_back(self, request):
        if "DIE" in os.environ:
            self.store.remove_after = lambda number: os.kill(os.getpid(), signal.SIGKILL)
        super().roll_back(request)
"""
WORDS = (
    *(*EAGER, "plugins=[my_trainer]", "trainer._target_=my_trainer.TroubledTrainer", "trainer.guard.max_skipped=1"),
    *("curriculum.stages.main.steps=12", "checkpoint.every_steps=5", "trainer.eval_every_steps=0"),
)


def environment(folder: Path) -> dict[str, str]:
    """What the trainer needs to be found, and to know its bad rows in every life."""
    bad = folder / "bad"
    bad.mkdir(parents=True, exist_ok=True)
    (folder / "my_trainer.py").write_text(TRAINER)
    return {"PYTHONPATH": str(folder), "BAD_ROWS": str(bad)}


def ended(folder: Path, lab: Path) -> None:
    """Run to the end."""
    done = run(*WORDS, output_dir=folder, env=environment(lab), as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """A run of six iterations; it goes back from step 9 to 5, inside the third, and passes over steps 7 to 9."""
    folder, lab = tmp_path_factory.mktemp("rolled_back"), tmp_path_factory.mktemp("lab")
    ended(folder, lab)
    return folder, lab


def test_it_samples_anew_what_is_behind_and_nothing_that_is_passed_over(rolled_back) -> None:
    folder, _ = rolled_back
    result = json.loads((folder / "own" / "result.json").read_text())
    assert result["guard"] == {"skipped": 0, "rollbacks": 1, "passed_over": [[7, 9]]}
    store = RolloutStore(str(folder / "own" / "rollouts"))
    assert store.iterations() == [0, 2, 4, 8, 10], "all steps of 6 are passed over, one of 8 is not"
    assert [store.read(number).rollbacks for number in store.iterations()] == [0, 0, 0, 1, 1]
    progress = json.loads((folder / "own" / "checkpoints" / "step_00000012" / "progress.json").read_text())
    assert {str(number): store.read(number).sha256 for number in store.iterations()}.items() <= progress[
        "rollouts"
    ].items()
    assert "6" not in progress["rollouts"]
    assert [each["step"] for each in logged(folder) if "train/lr" in each] == [1, 2, 3, 4, 5, 6, 10, 11, 12]


@pytest.mark.parametrize("step", [5, 10], ids=["before_the_next_checkpoint", "after_it"])
def test_killed_behind_a_rollback_it_ends_in_the_same_bytes(rolled_back, tmp_path, step) -> None:
    """Before the next checkpoint it goes that way again; answers from behind the rollback are none of the first way."""
    folder, lab = rolled_back
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    forget_after(tmp_path, step)
    ended(tmp_path, lab)
    assert stored(tmp_path) == stored(folder)
    assert state(tmp_path) == state(folder)
    assert logged(tmp_path) == logged(folder)


def test_killed_in_a_rollback_it_ends_in_the_same_bytes(rolled_back, tmp_path) -> None:
    """Checkpoints are removed, answers are not yet."""
    folder, _ = rolled_back
    own = environment(tmp_path / "lab")
    done = run(*WORDS, output_dir=tmp_path / "run", env=own | {"DIE": "1"}, as_typed=True)
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    assert {"000006.safetensors", "000008.safetensors"} <= stored(tmp_path / "run").keys()
    assert max(os.listdir(tmp_path / "run" / "own" / "checkpoints")) == "step_00000005"
    ended(tmp_path / "run", tmp_path / "lab")
    assert stored(tmp_path / "run") == stored(folder)
    assert state(tmp_path / "run") == state(folder)
    assert logged(tmp_path / "run") == logged(folder)
