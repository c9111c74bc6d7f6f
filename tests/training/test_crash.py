"""SIGKILL at drawn instants, inside saves too: the run ends with the same records, rows and bytes as one left alone.

tests/benchmarks/crash.py does the same with 50 kills.
"""

import random

import pytest

from tests.training.crashing import Run, require_equal

pytestmark = pytest.mark.xla


def test_a_run_killed_at_random_ends_as_one_left_alone(tmp_path):
    folder = f"prepare.folder={tmp_path / 'prepared'}"
    whole, killed = (Run(tmp_path / name, (folder,)) for name in ("whole", "killed"))
    wall, rng = whole.finish(), random.Random(6)
    killed.kill_in_save(2, delay=rng.random() * 0.005)
    killed.kill_at((0.4 + 0.4 * rng.random()) * wall)
    killed.kill_in_save(3, delay=rng.random() * 0.005)
    killed.finish()
    print([death.__dict__ for death in killed.deaths], killed.resumes)
    assert len(killed.deaths) >= 2
    require_equal(killed, whole)
