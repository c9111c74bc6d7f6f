"""The fan-out: what one logger's failure means for the others and for the run."""

from pathlib import Path
from typing import Any

import pytest

from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.base import Loggers
from tpu_experiments.loggers.plan_estimates import PlanEstimates
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.storage.spool import Spool
from tpu_experiments.training.batches import RunInputs
from tpu_experiments.training.outputs import RunOutputs


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.calls.append((step, values))

    def text(self, step: int, *, tag: str, text: str) -> None:
        self.calls.append((step, tag, text))

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        self.calls.append((values, metrics))

    def finish(self) -> None:
        self.calls.append("finish")


class Failing(Recorder):
    def scalars(self, step: int, values: dict[str, float]) -> None:
        super().scalars(step, values)
        raise OSError("disk full")

    def finish(self) -> None:
        super().finish()
        raise OSError("still full")


class FailingOptional(Failing):
    on_error = "drop"


def test_every_logger_gets_every_call() -> None:
    one, two = Recorder(), Recorder()
    loggers = Loggers({"one": one, "two": two})
    loggers.scalars(1, {"train/loss": 2.0})
    loggers.text(1, tag="sample", text="da")
    loggers.hparams({"lr": 1e-3}, {"eval/loss": 1.5})
    loggers.finish()
    loggers.finish()  # in a `finally`, after the run did it
    expected = [(1, {"train/loss": 2.0}), (1, "sample", "da"), ({"lr": 1e-3}, {"eval/loss": 1.5}), "finish"]
    assert one.calls == two.calls == expected


class Keeping(Recorder):
    def ends(self, ended: str) -> None:
        self.calls.append(ended)


def test_a_logger_that_keeps_how_a_run_ended_is_told_before_its_end() -> None:
    keeping, other = Keeping(), Recorder()
    Loggers({"one": keeping, "two": other}).finish("stopped")
    assert keeping.calls == ["stopped", "finish"]
    assert other.calls == ["finish"]


@pytest.mark.parametrize("ended", ["finished", "stopped", "failed"])
def test_a_run_tells_its_loggers_how_it_ended_and_a_rollback_is_no_failure(ended: Any, tmp_path: Path) -> None:
    before, after = Keeping(), Keeping()
    outputs = RunOutputs(
        Config(),
        RunFolder(str(tmp_path), "x"),
        inputs=RunInputs(None, {}, []),
        loggers=Loggers({"one": before}),
        provenance={},
        estimates=PlanEstimates(),
        ledger=None,
        spool=Spool(str(tmp_path), key="x", marker="COMMIT.json"),
        reopen_loggers=lambda: Loggers({"one": after}),
    )
    outputs.rewind(0, num_lost=1)
    outputs.close(ended)
    assert before.calls == ["stopped", "finish"]
    assert after.calls == [ended, "finish"]


def test_an_optional_logger_is_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    optional, other = FailingOptional(), Recorder()
    loggers = Loggers({"wandb": optional, "jsonl": other})
    loggers.scalars(1, {})
    loggers.scalars(2, {})
    loggers.finish()
    assert "logger=wandb failed and is disabled" in caplog.text
    assert optional.calls == [(1, {})]
    assert other.calls == [(1, {}), (2, {}), "finish"]


def test_a_required_logger_stops_the_run_after_the_others_have_the_record() -> None:
    other = Recorder()
    loggers = Loggers({"jsonl": Failing(), "tensorboard": other})
    with pytest.raises(OSError, match="disk full"):
        loggers.scalars(1, {})
    with pytest.raises(OSError, match="still full"):
        loggers.finish()
    assert other.calls == [(1, {}), "finish"]


def test_without_loggers_nothing_happens() -> None:
    Loggers({}).scalars(1, {"train/loss": 1.0})
