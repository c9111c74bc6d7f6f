"""Settings of a run that starts from what another has trained."""

from dataclasses import dataclass

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class StartConfig:
    """Where a new run's trained tensors begin; once the run has a checkpoint of its own, nothing of it is read."""

    run: str | None = place("folder", default=None)
    """Folder of a run, or of a LoRA adapter in PEFT's layout, local or gs://. null begins as `lora.init` or the base
    model says."""
    step: int | None = number(default=None, at_least=1)
    """Step of that run's checkpoint; null takes its newest one, which of a finished run is its end, and where it has
    none its `adapter/` or `model/`."""
    take: str = choice("weights", "all", default="weights")
    """`weights` alone, with a fresh optimizer; `all`: also the optimizer's state, its moments and its count of
    updates."""


def start_problems(start: StartConfig) -> list[str]:
    """Settings that do not go together."""
    if start.run is not None:
        return []
    given = {"start.step": start.step, "start.take": start.take if start.take != "weights" else None}
    return [
        f"{key}={value} without start.run=; name the folder of the run to start from."
        for key, value in given.items()
        if value is not None
    ]
