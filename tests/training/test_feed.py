"""Training through the feed: the same losses to the bit, no further program, and no process that waits for another."""

import json
import os

import pytest

from tests import forks
from tests.training.feeding import NUM_STEPS
from tests.training.runs import SAME_SUMS, finished, losses, run

pytestmark = pytest.mark.xla
COMMON = (
    "model=qwen05b",
    "data=[sample_text]",
    "lora=all_linear_r8",
    "debug=smoke",
    "trainer.log_every_steps=1",
    "hw.runtime=eager",
)
BREAKING = '''
"""A process whose data ends in an error."""

from tpu_experiments.training.trainer import Trainer


def breaking(batches):
    for index, batch in enumerate(batches):
        if index == 3:
            raise OSError("disk gone")
        yield batch


class Breaking(Trainer):
    def run_stage(self, stage):
        feed = self.runtime.feed
        if self.runtime.rank == 1:
            self.runtime.feed = lambda batches, **settings: feed(breaking(batches), **settings)
        super().run_stage(stage)
'''


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "num_devices"), [("inline", 1), ("spmd", 2)])
def test_losses_and_programs_are_those_of_put(parallel, num_devices):
    command = ["-m", "tests.training.feeding", parallel, str(num_devices)]
    # With several threads XLA's CPU matrix products sum in an order of their own: one ulp differed on a busy machine.
    done = forks.run(command, env=os.environ | SAME_SUMS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["put"]["losses"]) == NUM_STEPS
    assert found["feed"]["losses"] == found["feed_two_threads"]["losses"] == found["put"]["losses"]
    # One graph, so the program of `put` serves the others too.
    assert [found[way]["compiles"] for way in ("put", "feed", "feed_two_threads")] == [1, 0, 0]
    assert all(way["compiles_after_warmup"] == 0 for way in found.values())
    assert all(way["same_sharding"] for way in found.values())
    assert ("devices=[1,2,1]" in found["feed"]["sharding"]) == (parallel == "spmd")


def test_rows_trimmed_to_their_longest_train_as_padded_ones_do(tmp_path):
    shape = ("prepare.long_documents=truncate", "trainer.seq_len=128", "trainer.global_batch_rows=4")
    few = ("loader.pad_multiple=16", "data.sample_text.max_documents=60")
    padded = finished(*COMMON, *shape, *few, "prepare.packing=pad", output_dir=tmp_path / "pad")
    trimmed = finished(*COMMON, *shape, *few, "prepare.packing=none", output_dir=tmp_path / "none")
    assert losses(tmp_path / "none") == pytest.approx(losses(tmp_path / "pad"), abs=1e-5)
    assert trimmed["eval_loss"] == pytest.approx(padded["eval_loss"], abs=1e-5)
    assert trimmed["tokens"] == padded["tokens"]


@pytest.mark.slow
def test_a_process_that_gets_only_padding_in_the_last_step_does_not_keep_the_other_waiting(tmp_path):
    epoch = ("curriculum.stages.text.steps=null", "curriculum.stages.text.epochs=1", "trainer.max_stage_steps=null")
    sizes = ("data.sample_text.max_documents=14", "trainer.global_batch_rows=24", "trainer.micro_batch_rows=4")
    one = finished(*COMMON, *epoch, *sizes, output_dir=tmp_path / "one")
    two = ("hw.parallel=spawn", "hw.num_devices=2")
    both = finished(*COMMON, *epoch, *sizes, *two, output_dir=tmp_path / "two")
    (manifest,) = (tmp_path / "two" / "prepared").glob("*-rows-*/manifest.json")
    num_rows = json.loads(manifest.read_text())["splits"]["train"]["rows"]
    assert 0 < num_rows % 24 <= 12
    assert both["stages"][0]["steps"] == -(-num_rows // 24)
    assert both["tokens"] == one["tokens"]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.slow
def test_an_error_in_one_process_of_two_ends_both(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "breaking_lab.py").write_text(BREAKING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lab'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    own = ("plugins=[breaking_lab]", "trainer._target_=breaking_lab.Breaking", "hw.parallel=spawn", "hw.num_devices=2")
    done = run(*COMMON, *own, output_dir=tmp_path / "out")
    assert done.returncode != 0
    (log,) = (tmp_path / "out").glob("*/run.log")
    # The other process loses its connection and may be the one that is told; the log has the traceback of both.
    assert "OSError: disk gone" in log.read_text()
    assert "run.log; attach it" in done.stderr
