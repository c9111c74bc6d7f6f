"""Mean loss of each pass over a stage's rows: from per-step losses by hand, over a kill, and in every record."""

import hashlib
import json
import math
import shutil

import pytest

from tests.training.runs import finished, records
from tpu_experiments.checkpoint.progress import EpochRecord
from tpu_experiments.training.epochs import Passes, count
from tpu_experiments.training.meters import Reading

SMALL = (
    "hw.runtime=eager",
    "lora=all_linear_r8",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=32",
    "trainer.eval_every_steps=0",
    "trainer.max_eval_rows=8",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=99",
    "sample.max_new_tokens=0",
    "data=sample_text",
    "curriculum=single",
    "curriculum.stages.main.epochs=2.5",
    "name=run",
)


class Rows:
    """Ten rows a pass, every fifth row of a batch replayed from elsewhere."""

    num_rows = 10

    def num_replayed(self, num_rows: int) -> int:
        return num_rows // 5


def reading(first: int, last: int) -> Reading:
    losses = [(step, float(step)) for step in range(first, last + 1)]
    return Reading(last, 1e-3, losses, 0.5, 0, 0.0, supervised=[10.0 * step for step, _ in losses])


def test_a_step_belongs_to_the_pass_of_its_first_row() -> None:
    """Batches of five have four own rows: passes begin with own rows 0, 10, 20; steps with 0, 4, 8, 12, 16, 20, 24."""
    passes, found, over = Passes(Rows(), global_rows=5, num_steps=7, offset=100), [], []
    assert [passes.epoch_of(step) for step in range(101, 108)] == [1, 1, 1, 2, 2, 3, 3]
    for first, last in ((101, 102), (103, 105), (106, 107)):
        over.append([each.epoch for each in count(reading(first, last), found, passes)])
    assert over == [[], [1, 2], []], "the third is cut off"
    assert found[0] == EpochRecord(
        1, 3, supervised=3060.0, loss_sum=sum(10.0 * s * s for s in (101, 102, 103)), is_over=True
    )
    assert [record.is_over for record in found] == [True, True, False]


def test_a_pass_whose_last_step_came_to_nothing_is_over_all_the_same() -> None:
    passes, found = Passes(Rows(), global_rows=5, num_steps=7, offset=0), []
    assert not list(count(reading(1, 2), found, passes))
    later = reading(4, 4)
    assert [each.steps for each in count(later, found, passes)] == [2]


@pytest.fixture(scope="module")
def by_steps(tmp_path_factory):
    """The same run with a record of every step."""
    folder = tmp_path_factory.mktemp("by_steps")
    return folder, finished(*SMALL, "trainer.log_every_steps=1", output_dir=folder)


@pytest.mark.slow
@pytest.mark.xla
def test_it_is_the_mean_over_the_supervised_tokens_of_the_steps(by_steps):
    """Against the losses of single steps and their supervised tokens, of which the meters tell."""
    folder, result = by_steps
    each = [record for record in records(folder) if "train/loss" in record]
    audit = json.loads((folder / "run" / "audit.json").read_text())
    num_rows = audit["sources"][0]["splits"]["train"]["rows"]
    (stage,) = result["stages"]
    losses = {record["step"]: record["train/loss"] for record in each}
    tokens = {r["step"]: r["perf/supervised_tokens_per_second"] * r["perf/step_seconds"] for r in each}
    assert [epoch["is_over"] for epoch in stage["epochs"]] == [True, True, False]
    assert sum(epoch["steps"] for epoch in stage["epochs"]) == len(each) == stage["steps"]
    for epoch in stage["epochs"]:
        own = [step for step in losses if (step - 1) * 32 // num_rows + 1 == epoch["epoch"]]
        assert epoch["steps"] == len(own)
        assert epoch["supervised_tokens"] == pytest.approx(sum(tokens[step] for step in own), abs=0.5)
        expected = sum(losses[step] * tokens[step] for step in own) / sum(tokens[step] for step in own)
        assert epoch["train_loss"] == pytest.approx(expected, rel=1e-9)
        assert epoch["train_perplexity"] == math.exp(epoch["train_loss"])


@pytest.mark.xla
@pytest.mark.slow
def test_records_and_a_killed_run_have_the_same_numbers(by_steps, tmp_path):
    """Logged every seven steps, and resumed from a checkpoint inside a pass and inside a log record."""
    _, first = by_steps
    whole = finished(*SMALL, "trainer.log_every_steps=7", output_dir=tmp_path)
    assert whole["stages"][0]["epochs"] == first["stages"][0]["epochs"]
    lines = [record for record in records(tmp_path) if "train/epoch" in record]
    assert [line["train/epoch"] for line in lines] == [1.0, 2.0]
    for line, epoch in zip(lines, first["stages"][0]["epochs"], strict=False):
        assert line["train/epoch_loss"] == epoch["train_loss"]
        assert line["train/epoch_perplexity"] == epoch["train_perplexity"]
    for record in records(tmp_path):
        if "train/loss" in record:
            assert record["train/perplexity"] == math.exp(record["train/loss"])
    folder = tmp_path / "run"
    (folder / "result.json").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > 5:
            shutil.rmtree(checkpoint)
    again = finished(*SMALL, "trainer.log_every_steps=7", output_dir=tmp_path)
    assert again["stages"][0]["epochs"] == whole["stages"][0]["epochs"]
    assert [record for record in records(tmp_path) if "train/epoch" in record] != lines, "they were written anew"
    assert [r["train/epoch_loss"] for r in records(tmp_path) if "train/epoch" in r] == [
        line["train/epoch_loss"] for line in lines
    ]


@pytest.mark.slow
@pytest.mark.xla
def test_tensorboard_has_them(by_steps):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, result = by_steps
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    found = [event.value for event in events.Scalars("train/epoch_loss")]
    assert found == pytest.approx([epoch["train_loss"] for epoch in result["stages"][0]["epochs"][:2]])
    assert events.Scalars("train/perplexity")


@pytest.mark.xla
@pytest.mark.slow
def test_a_checkpoint_that_counted_nothing_gives_no_number(by_steps, tmp_path):
    """Of a version before there were any: what is left of a pass is no mean of it."""
    folder, _ = by_steps
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "result.json").unlink()
    checkpoints = tmp_path / "run" / "checkpoints"
    for checkpoint in checkpoints.iterdir():
        if int(checkpoint.name.removeprefix("step_")) > 5:
            shutil.rmtree(checkpoint)
    place = checkpoints / "step_00000005"
    progress = json.loads((place / "progress.json").read_text())
    del progress["stages"][0]["epochs"], progress["open_supervised"]
    content = json.dumps(progress).encode()
    commit = json.loads((place / "COMMIT.json").read_text())
    commit["files"]["progress.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (place / "progress.json").write_bytes(content)
    (place / "COMMIT.json").write_text(json.dumps(commit))
    result = finished(*SMALL, "trainer.log_every_steps=1", output_dir=tmp_path)
    assert result["stages"][0]["epochs"] is None
