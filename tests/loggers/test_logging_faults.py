"""Every operation on a remote run folder goes wrong once, in every way; the next start finds it whole."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import faulty
from tests.faulty import FAULTS, Died, going_wrong
from tpu_experiments.loggers import tensorboard
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.jsonl import JsonlLogger
from tpu_experiments.loggers.tensorboard import TensorBoardLogger
from tpu_experiments.storage import paths, retry, spool
from tpu_experiments.storage import run_folder as module
from tpu_experiments.storage.run_folder import RunFolder, config_yaml, open_run

OUTPUT = "faulty://bkt/runs"
STEPS = [1, 2]


@pytest.fixture(autouse=True)
def storage(monkeypatch, tmp_path):
    monkeypatch.setattr(retry, "pause", lambda seconds: True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    faulty.wipe()
    yield
    faulty.wipe()


def begun(config) -> LoggerContext:
    """A start of the run, as tasks/train.py makes it."""
    folder = open_run(config)
    folder.create(config)
    return LoggerContext(run_folder=folder, config=config, total_steps=5, resume_step=0)


def life(config) -> None:
    """A start, five records in both places, an end."""
    context = begun(config)
    for kind in (JsonlLogger, TensorBoardLogger):
        logger = kind(context)
        for step in STEPS:
            logger.scalars(step, {"train/loss": float(step)})
        with contextlib.suppress(OSError):  # told, and the data kept: tests/storage/test_mirror.py
            logger.finish()


def metrics(folder: RunFolder) -> list[int]:
    lines = paths.read_text(folder.path("metrics.jsonl")).splitlines()
    return [json.loads(line)["step"] for line in lines]


def curve(folder: RunFolder, into: Path) -> list[int]:
    """Steps in TensorBoard."""
    into.mkdir(exist_ok=True)
    for name in paths.list_names(folder.path("tensorboard")):
        (into / name).write_bytes(paths.read_bytes(folder.path("tensorboard", name)))
    found = EventAccumulator(str(into)).Reload()
    return [event.step for event in found.Scalars("train/loss")]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_operation_of_a_life(fault, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(spool.Mirror, "upload_if_due", lambda self: None)  # its thread would make the count vary
    config = make_config("name=x", f"output_dir={OUTPUT}")
    text = config_yaml(config)  # a tenth of a second each time
    monkeypatch.setattr(module, "config_yaml", lambda config: text)
    monkeypatch.setattr(tensorboard, "config_yaml", lambda config: text)
    with going_wrong(None, -1) as kind:
        life(config)
        total = kind.count
    assert total >= 9
    for n in range(total):
        faulty.wipe()
        with contextlib.suppress(Died, OSError), going_wrong(fault, n):
            life(config)
        folder = open_run(config)  # is not refused: whose run it is, is known or nothing is there
        if fault in ("fails", "answer_lost", "delays"):
            assert metrics(folder) == STEPS, f"operation {n} was to be repeated"
        life(config)
        assert metrics(folder) == STEPS, f"operation {n}"
        if n >= total - 2:  # no other touches it, and TensorBoard's reader takes its time
            assert curve(folder, tmp_path / f"{fault}{n}") == STEPS, f"operation {n}"
