"""The export at the end of a run, and its verification."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpu_experiments.checkpoint.errors import TrainingStopped, UnprovenError, on_rank_zero
from tpu_experiments.checkpoint.proof import Export
from tpu_experiments.checkpoint.state import are_sharded_over_hosts, averaged
from tpu_experiments.checkpoint.store import read_step, verify_newest
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.loaded import fault_of_written
from tpu_experiments.optim.ema import LAG
from tpu_experiments.runtime.host_copies import host_copy
from tpu_experiments.runtime.stacked import stacked
from tpu_experiments.storage import paths

if TYPE_CHECKING:  # the trainer imports this module
    from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)


def export_trained(trainer: "Trainer") -> dict[str, Any] | None:
    """Write the adapter or the model; return its verification, None where it is switched off."""
    stored = stored_parameters(trainer)
    take_averages(trainer, stored=stored)
    trainer.outputs.export(trainer.model, stored=stored)
    trainer.runtime.barrier("exported")
    return verify_export(trainer, stored=stored)


def stored_parameters(trainer: "Trainer") -> Mapping[str, Tensor] | None:
    """Return the trained tensors of the run's last checkpoint where no host has them whole, otherwise None.

    They are the averages where the run keeps such.

    Every process takes part, at the end of the run, whose last step is always saved.

    Raises:
        TrainingStopped: the checkpoint cannot be read.
    """
    if not are_sharded_over_hosts(trainer.parameters, trainer.runtime):
        return None
    folder, step = trainer.outputs.folder.path("checkpoints"), trainer.progress.step
    verify_newest(folder, trainer.runtime.hosts, before=step + 1)

    def read() -> Mapping[str, Tensor]:
        return read_step(folder, step, lambda _, groups: averaged(groups), max_held_bytes=0)

    try:
        return trainer.runtime.hosts.together(read)
    except (FileNotFoundError, ValueError) as error:
        raise TrainingStopped(
            f"{folder}; the checkpoint of step {step}, which the export is made from, cannot be read ({error}); "
            "the same command makes it again from the one before."
        ) from error


def verify_export(trainer: "Trainer", *, stored: Mapping[str, Tensor] | None) -> dict[str, Any] | None:
    """Return the verification of the written adapter or model; every process takes part.

    Args:
        stored: `stored_parameters`.
    """
    if not trainer.config.checkpoint.prove:
        return None
    folder = trainer.outputs.folder.path("adapter" if trainer.config.lora.r > 0 else "model")
    export = Export(
        folder,
        digests=trainer.outputs.export_digests,
        model=trainer.model,
        start=trainer.saver.start,
        max_held_bytes=trainer.config.checkpoint.max_copy_gib * 2**30,
        trained=stored,
    )
    found = export.verify(trainer.progress, loss_comparison=trainer.saver.loss_comparison, runtime=trainer.runtime)
    on_rank_zero(trainer.runtime, lambda: require_readable(trainer))
    return found


def require_readable(trainer: "Trainer") -> None:
    """Require transformers to compute from a written model what this run's classes compute from it.

    Raises:
        UnprovenError: it computes other logits, or cannot read it.
    """
    source, is_whole = trainer.model.source, trainer.config.lora.r == 0
    folder = trainer.outputs.folder.path("model" if is_whole else "base")
    is_written = is_whole or getattr(source, "random", False)
    if not is_written or not isinstance(source, HuggingFaceModel) or trainer.config.trainer.canary.when == "never":
        return
    if paths.is_remote(folder):
        log.info("check of %s by transformers: skipped (it is not on this machine; task=export makes it)", folder)
        return
    fault = fault_of_written(source, folder)
    if fault is not None:
        raise UnprovenError(fault)


def take_averages(trainer: "Trainer", *, stored: Mapping[str, Tensor] | None) -> None:
    """Replace the parameters by their averages, from which no step of the same optimizer state may follow.

    Args:
        stored: `stored_parameters`.
    """
    if not trainer.config.optim.is_averaged:
        return
    for name in trainer.model.order:
        lag = trainer.state[name][LAG]
        average = host_copy(trainer.parameters[name]) + host_copy(lag) if stored is None else stacked(stored, name)
        trainer.parameters[name] = trainer.runtime.place(average, name=name)
        trainer.state[name][LAG] = trainer.runtime.zeros(lag.shape, name=f"{name}/{LAG}")
