"""SIGTERM inside an evaluation or a sample: the last step is saved there, and the run ends as one left alone.

tests/benchmarks/stops.py sends it at 30 drawn instants.
"""

import pytest

from tests.training.crashing import Run, require_equal

STRUCK = (
    "plugins=[tests.training.stopping_lab]",
    "trainer._target_=tests.training.stopping_lab.Struck",
    "hw.runtime=eager",
    "trainer.max_eval_rows=64",
    "sample.max_new_tokens=12",
    "sample.at=evaluations",
    "checkpoint.every_steps=100",
)
"""Eight batches in an evaluation and twelve tokens in a sample; no checkpoint but those of stops and stages' ends."""
STRIKES = {"sample:15": 5, "evaluate:12": 8, "evaluate:14": 10}
"""Call that SIGTERM comes in, and the step before it: in mid-stage, at a stage's end, after that stage's checkpoint."""


TWO = ("hw.parallel=spawn", "hw.num_devices=2")


@pytest.mark.parametrize(
    ("how", "strikes"),
    [
        pytest.param((), ["sample:15", "evaluate:12"], id="one"),
        pytest.param((), STRIKES, id="one-all", marks=pytest.mark.slow),
        pytest.param(TWO, STRIKES, id="two", marks=pytest.mark.slow),
    ],
)
def test_a_stop_inside_an_evaluation_or_a_sample_loses_no_step(tmp_path, monkeypatch, how, strikes):
    """Records are compared with their samples; only the checkpoint's step shows that none was lost."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    common = (*STRUCK, *how, f"prepare.folder={tmp_path / 'prepared'}")
    whole, stopped = Run(tmp_path / "whole", common), Run(tmp_path / "stopped", common)
    whole.finish()
    for strike in strikes:
        calls.unlink()
        monkeypatch.setenv("STRIKE", strike)
        code = stopped.start().wait(timeout=600)
        assert code == 75, (stopped.folder / "output").read_text()[-4000:]
        newest = max((stopped.folder / "run" / "checkpoints").glob("step_*/COMMIT.json")).parent
        assert newest.name == f"step_{STRIKES[strike]:08d}"
        # A second process may be a call or two behind the one that was struck.
        assert strike in calls.read_text().split()[-(1 if not how else 4) :]
    monkeypatch.delenv("STRIKE")
    stopped.finish()
    require_equal(stopped, whole)
    assert stopped.resumes == [(STRIKES[strike], 0) for strike in strikes]


@pytest.mark.parametrize("how", [pytest.param((), id="one"), pytest.param(TWO, id="two", marks=pytest.mark.slow)])
def test_a_stop_inside_a_compilation_ends_the_process_where_nothing_is_lost(tmp_path, monkeypatch, how):
    """No signal handler of Python runs while the main thread is in the evaluation's first call."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STRIKE", "evaluate:1")
    monkeypatch.setenv("STUCK", "1")
    common = (*STRUCK, *how, f"prepare.folder={tmp_path / 'prepared'}", "checkpoint.grace_seconds=1")
    run = Run(tmp_path / "run", common)
    assert run.start().wait(timeout=300) == 75, (run.folder / "output").read_text()[-4000:]
    assert "stopped on request, inside a compilation" in (run.folder / "output").read_text()
