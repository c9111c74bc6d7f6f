"""Killed runs go on: the same records, rows and bytes as of one left alone; on other devices, up to rounding.

tests/benchmarks/crash.py kills 50 times, crash_preferring.py a run on preferences, or a pack of them, nine times.
"""

import random

import pytest

from tests.benchmarks.crash_preferring import references, run_in
from tests.forks import REPOSITORY
from tests.training.crashing import Run, require_equal

pytestmark = pytest.mark.xla
OTHER = REPOSITORY / ".venv-torchtpu" / "bin" / "python"
ON_4, ON_2 = (("hw.parallel=spmd", f"hw.num_devices={n}") for n in (4, 2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run left alone, on one device, and the seconds it took."""
    folder = tmp_path_factory.mktemp("whole")
    run = Run(folder / "whole", (f"prepare.folder={folder / 'prepared'}",))
    return run, run.finish()


def test_a_run_killed_at_random_ends_as_one_left_alone(whole, tmp_path):
    """Inside a save, and somewhere."""
    left_alone, wall = whole
    killed, rng = Run(tmp_path, left_alone.overrides), random.Random(6)
    killed.kill_in_save(2, delay=rng.random() * 0.005)
    killed.kill_at((0.4 + 0.4 * rng.random()) * wall)
    killed.finish()
    assert killed.deaths, "on a busy machine the second may come when the run has ended"
    require_equal(killed, left_alone)


@pytest.mark.skipif(not OTHER.exists(), reason="needs the environment of TorchTPU (tpu_experiments/runtime/README.md)")
@pytest.mark.parametrize("runtime", ["eager", "torchtpu"])
def test_a_run_of_torch_xla_goes_on_under_another_release_of_torch(runtime, whole, tmp_path):
    """Killed in the first stage under torch 2.9, it goes on in TorchTPU's environment, by its programs too."""
    left_alone, _ = whole
    moved = Run(tmp_path, left_alone.overrides)
    moved.die_after(3)
    moved.finish(f"hw.runtime={runtime}", python=OTHER)
    ((step, _),) = moved.resumes
    assert 2 <= step < 8
    require_same_losses(moved, left_alone)


@pytest.mark.slow
@pytest.mark.parametrize("is_pack", [False, True])
def test_a_run_on_preferences_goes_on_with_the_same_reference_records_and_bytes(is_pack, tmp_path):
    """Killed in its reference pass, and between two records, of which the second has the measures of all its steps."""
    killed, left_alone = (run_in(tmp_path / name, is_pack=is_pack) for name in ("killed", "whole"))
    left_alone.finish()
    killed.kill_after_line("reference 8 x 128: compiled", delay=0.0)
    killed.kill_after_line("checkpoint of step 4", delay=0.0)
    killed.finish()
    assert killed.deaths, "on a busy machine the second may come when the run has ended"
    require_equal(killed, left_alone)
    assert references(killed) == references(left_alone)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_devices(whole, tmp_path):
    """Four, one, four, two; sums over rows come in another order, so the losses are equal to 1e-5, the rows exactly."""
    left_alone, _ = whole
    elastic = Run(tmp_path, left_alone.overrides)
    elastic.die_after(3, *ON_4)
    elastic.die_after(6)
    elastic.die_after(9, *ON_4)
    elastic.finish(*ON_2)
    resumed = [step for step, _ in elastic.resumes]
    assert 2 <= resumed[0] < resumed[1]
    assert resumed[2] >= 8, "the last life is in stage 2"
    require_same_losses(elastic, left_alone)


def require_same_losses(run, left_alone):
    """Losses to 1e-5, and exactly the rows of a run left alone."""
    assert [sorted(record) for record in run.records] == [sorted(record) for record in left_alone.records]
    for ours, theirs in zip(run.records, left_alone.records, strict=True):
        losses = [name for name in ours if name.endswith("/loss")]
        assert ours["step"] == theirs["step"]
        assert [ours[name] for name in losses] == pytest.approx([theirs[name] for name in losses], abs=1e-5)
    assert {step: rows[0] for step, rows in run.rows.items()} == {s: rows[0] for s, rows in left_alone.rows.items()}
    assert all(repeated == rows[0] for rows in run.rows.values() for repeated in rows)
