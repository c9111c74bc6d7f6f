"""A run whose program changes under it: it stops with what changed, loses nothing, and goes on when it is let."""

import json
import os
from pathlib import Path

import pytest

from tests.training.runs import finished, losses, run

pytestmark = pytest.mark.xla
TRAINERS = '''
"""Trainers with a mistake that plain torch forgives."""

from tpu_experiments.training.trainer import Trainer


class Growing(Trainer):
    def row_loss(self, module, parameters, rows):
        sums, weights = super().row_loss(module, parameters, rows)
        return sums.pow(1 + self.progress.step / 1000), weights


class Shorter(Trainer):
    def queue_step(self, info, batch):
        if info.stage_step == 3:
            batch = {name: t[..., :48] if t.ndim == 3 else t for name, t in batch.items()}
        super().queue_step(info, batch)
'''
COMMON = (
    "model=qwen05b",
    "data=[sample_text]",
    "debug=smoke",
    "lora=all_linear_r8",
    "trainer.max_stage_steps=4",
    "trainer.log_every_steps=1",
    "sample.max_new_tokens=0",
    "plugins=[careless_lab]",
)


@pytest.fixture(autouse=True)
def careless_lab(tmp_path, monkeypatch) -> None:
    (tmp_path / "careless_lab.py").write_text(TRAINERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def error_of(done) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return str(message)


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in output_dir.glob("*/checkpoints/*/COMMIT.json"))


def test_a_python_number_that_changes_stops_the_run_which_resumes_when_allowed(tmp_path):
    out, own = tmp_path / "out", "trainer._target_=careless_lab.Growing"
    message = error_of(run(*COMMON, own, output_dir=out))
    assert "stopped after step 2: train was compiled again at its call 2 though its inputs are as before" in message
    assert "f32[] constant(1) became f32[] constant(1.002) (" in message
    assert "careless_lab.py:10" in message
    assert "trainer.on_recompile=warn" in message
    assert checkpoints(out) == ["step_00000002"]
    assert not list(out.glob("*/result.json"))
    result = finished(*COMMON, own, "trainer.on_recompile=warn", output_dir=out)
    assert [stage["steps"] for stage in result["stages"]] == [4]
    assert len(losses(out)) == 4
    assert result["compiles_after_warmup"] >= 1
    (log,) = out.glob("*/run.log")
    assert log.read_text().count("train was compiled again") == 1


@pytest.mark.slow
def test_a_batch_of_another_length_is_refused_before_it_is_compiled(tmp_path):
    message = error_of(run(*COMMON, "trainer._target_=careless_lab.Shorter", output_dir=tmp_path / "out"))
    assert "stopped after step 3: train would be compiled again: ids, learn, positions, segments was" in message
    assert "was 1 x 8 x 64 int32 and is 1 x 8 x 48 int32" in message
    assert checkpoints(tmp_path / "out") == ["step_00000003"]
    (metrics,) = (tmp_path / "out").glob("*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert max(steps) == 3
