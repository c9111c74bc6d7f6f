"""A run on answers that are all worth the same ends with what it began, and says so."""

import pytest

from tests.training import runs
from tpu_experiments.training.rollouts import RolloutStore

JOB = ("model=tiny", "data=gsm8k", "objective=grpo", "reward=number", "debug=smoke", "hw.runtime=eager")


@pytest.mark.slow
def test_nothing_is_learnt_from_answers_that_are_never_right(tmp_path):
    done = runs.run(*JOB, "trainer.max_stage_steps=2", "name=a", output_dir=tmp_path, as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prompts: 6 to train on and 1 held out, of 52 tokens on average" in done.stdout + done.stderr
    assert "rollout.rewards; in 2 steps no answer was worth more than another" in done.stdout + done.stderr
    page = (tmp_path / "a" / "rollouts.html").read_text(encoding="utf-8")
    assert "Written after step 1" in page
    assert "Written after step 0" in page
    store = RolloutStore(str(tmp_path / "a" / "rollouts"))
    assert store.iterations() == [0, 1]
    found = store.read(1)
    assert found is not None
    assert found.rewards_NF.tolist() == [[0.0]] * 8
