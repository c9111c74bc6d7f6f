"""The place of a run that is the only one of its process; a pack gives its runs seats (pack.py)."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.loggers.runlog import start_run_log, stop_run_log
from tpu_experiments.models.sources.build import BuiltModel, build_model
from tpu_experiments.runtime.base import Program
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training.lives import Shares
from tpu_experiments.training.step import StepOutput

if TYPE_CHECKING:  # the trainer imports this module
    from tpu_experiments.training.trainer import Trainer


class Alone:
    """A run's place in its process, which it has for itself."""

    number = 0
    """Number among the runs of its program."""

    @property
    def program(self) -> str | None:
        """Return what tells its programs from those of the same run alone; None for one alone."""
        return None

    @property
    def shares(self) -> Shares | None:
        """Return the parts of the machine's time that the runs of its program have had; None for one alone."""
        return None

    def open_log(self, folder: RunFolder, *, rank: int) -> Callable[[], None]:
        """Write run.log from now on; return what closes it."""
        start_run_log(folder, rank=rank)
        return stop_run_log

    def watch(self, trainer: "Trainer") -> None:
        """End the process where a request to stop finds it stuck; several hosts end together, or not at all."""
        if trainer.runtime.hosts.size == 1 and trainer.runtime.rank == 0:
            trainer.stop.end_where_stuck(trainer.has_saved)

    def build(self, trainer: "Trainer") -> BuiltModel:
        """Load the model onto the device, with its adapters."""
        return build_model(
            trainer.model_source(),
            lora=trainer.config.lora,
            seed=trainer.config.seed,
            place=trainer.runtime.place,
            folding=trainer.runtime.folding,
            is_trained=True,
        )

    def lora(self, trainer: "Trainer") -> LoraConfig:
        """Return the settings of the adapters that `evaluated` has."""
        return trainer.config.lora

    def evaluated(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters that evaluations use."""
        return own

    def step_program(self, trainer: "Trainer") -> Program[StepOutput]:
        """Return the program of the run's step."""
        return trainer.runtime.program(trainer.step_in_place, name="train", held=trainer.step_tensors)

    def wait(self, state: str) -> None:
        """Return at once: there is no other run to wait for."""
