"""Errors that end all processes of a run."""

import pytest

from tpu_experiments.checkpoint.errors import TrainingStopped, on_rank_zero
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import HwConfig
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.storage.retry import StorageFailed, kind_of


def test_an_error_that_stays_itself_keeps_its_cause():
    """Python lets an error be its own cause, which has no end for whoever follows causes."""

    def refused() -> None:
        raise ConfigError("rollout.rewards; no module.") from FileNotFoundError(2, "gone")

    with pytest.raises(ConfigError, match="no module") as caught:
        on_rank_zero(EagerRuntime(HwConfig()), refused)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert kind_of(caught.value) == kind_of(caught.value.__cause__)


def test_an_error_of_storage_stops_the_training_and_is_named_as_the_cause():
    def failed() -> None:
        raise StorageFailed("no room.")

    with pytest.raises(TrainingStopped, match="no room") as caught:
        on_rank_zero(EagerRuntime(HwConfig()), failed)
    assert isinstance(caught.value.__cause__, StorageFailed)
