"""metrics.jsonl: one strict JSON object a line, and one curve however often the run was killed."""

import errno
import io
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.jsonl import JsonlLogger
from tpu_experiments.storage import paths

MakeContext = Callable[..., LoggerContext]


def records(context: LoggerContext) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.read_text(context.run_folder.path("metrics.jsonl")).splitlines()]


def start(context: LoggerContext, *, steps: list[int]) -> JsonlLogger:
    logger = JsonlLogger(context)
    for step in steps:
        logger.scalars(step, {"train/loss": 10.0 - step})
    return logger


def test_a_line_is_there_at_once(make_context: MakeContext) -> None:
    context = make_context()
    before = time.time()
    logger = start(context, steps=[1])
    logger.scalars(2, {"train/loss": float("nan"), "data/tokens": 3})
    logger.text(2, tag="sample", text="doi\nrânduri")
    first, second, third = records(context)
    logger.finish()
    assert before <= first.pop("time") <= time.time()
    assert first == {"step": 1, "train/loss": 9.0}
    assert (second["train/loss"], second["data/tokens"]) == (None, 3)
    assert third["sample"] == "doi\nrânduri"


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_resumed_run_has_one_curve(place: str, make_context: MakeContext) -> None:
    output_dir = None if place == "local" else f"memory://{uuid.uuid4().hex}"
    start(make_context(output_dir=output_dir), steps=[0, 1, 2, 3, 4]).finish()
    context = make_context(output_dir=output_dir, resume_step=2)
    start(context, steps=[3, 4, 5]).finish()
    assert [record["step"] for record in records(context)] == [0, 1, 2, 3, 4, 5]


def test_an_evaluation_behind_the_last_checkpoint_is_there_once(make_context: MakeContext) -> None:
    logger = start(make_context(), steps=[1, 2])
    logger.scalars(2, {"eval/loss": 3.0})
    logger.finish()
    logger = JsonlLogger(make_context(resume_step=2))
    logger.scalars(2, {"eval/loss": 3.0})
    logger.text(2, tag="sample_after", text="a")
    logger.finish()
    assert [sorted(record)[0] for record in records(make_context())] == ["step", "step", "eval/loss", "sample_after"]


def test_a_run_killed_before_its_first_checkpoint_starts_over(make_context: MakeContext) -> None:
    start(make_context(), steps=[0, 1, 2]).finish()
    context = make_context()
    start(context, steps=[0, 1]).finish()
    assert [record["step"] for record in records(context)] == [0, 1]


@pytest.mark.parametrize("torn", ['{"step": 3, "ti', "{", '{"step": 2, "time": 1.0}'])
def test_a_torn_last_line_is_dropped(torn: str, make_context: MakeContext, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context()
    start(context, steps=[1, 2]).finish()
    with open(context.run_folder.path("metrics.jsonl"), "a") as file:
        file.write(torn)
    start(make_context(resume_step=2), steps=[3]).finish()
    assert [record["step"] for record in records(context)] == [1, 2, 3]
    assert "torn" in caplog.text


def test_a_text_with_other_line_separators_is_one_line(make_context: MakeContext) -> None:
    logger = start(make_context(), steps=[1])
    logger.text(1, tag="sample", text="a\u2028b\x85c\x0bd")
    logger.finish()
    context = make_context(resume_step=1)
    start(context, steps=[2]).finish()
    lines = paths.read_text(context.run_folder.path("metrics.jsonl")).split("\n")
    assert [json.loads(line)["step"] for line in lines if line] == [1, 1, 2]


class SmallDisk(io.FileIO):
    """A file on a disk with room for so many bytes; then a write is cut short, and the next one fails."""

    room = 0

    def write(self, data: Any) -> int:
        written = min(len(data), self.room)
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= written
        return super().write(data[:written])


def test_records_of_a_full_disk_wait_until_there_is_room(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context()
    logger = start(context, steps=[1])
    logger._file.close()
    disk = logger._file = SmallDisk(context.run_folder.path("metrics.jsonl"), "ab")
    disk.room = 10
    for step in (2, 3, 4):
        logger.scalars(step, {"train/loss": 0.0})
        assert [record["step"] for record in records(context)] == [1]  # no half line
    assert caplog.text.count("are kept in memory until the disk has space") == 1
    disk.room = 10_000
    logger.scalars(5, {"train/loss": 0.0})
    logger.finish()
    assert [record["step"] for record in records(context)] == [1, 2, 3, 4, 5]
