"""Schema of the group `start`: warm start of a new run from the weights of another run or adapter."""

from dataclasses import dataclass

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class StartConfig:
    """Initial values of a new run's trained tensors; ignored once the run has a checkpoint of its own."""

    run: str | None = place("source", default=None)
    """Folder of a run, or of a LoRA adapter in PEFT's layout: local, gs:// or, on the Hub, hf://owner/name[@revision].
    null starts from `lora.init`, or from the base model's weights if there is no adapter. An experiment that trains on
    from another one's run has `<run of OTHER>`, and is trained with this key alone."""
    step: int | None = number(default=None, at_least=1)
    """Step of that run's checkpoint. null takes the newest checkpoint (the last step of a finished run), or the run's
    export in `adapter/` or `model/` if it has no checkpoint."""
    take: str = choice("weights", "all", default="weights")
    """`weights`: only the weights, with a fresh optimizer. `all`: also the optimizer's moments and update count; needs
    a checkpoint of a run with the same optimizer."""


def is_to_give(run: str | None) -> bool:
    """Return whether a `start.run` only says which experiment's run it has to be.

    >>> is_to_give("<run of mistral7b_ro>"), is_to_give("outputs/mistral7b_ro")
    (True, False)
    """
    return run is not None and run.startswith("<") and run.endswith(">")


def start_problems(start: StartConfig) -> list[str]:
    """Return problems of settings that need `start.run` but do not have it."""
    if is_to_give(start.run):
        name = str(start.run).strip("<>").removeprefix("run of ")
        return [
            f"start.run={start.run}; this experiment trains on from that run; write start.run=outputs/{name}, or "
            "wherever its folder is (gs://..., hf://owner/name); start.run=null starts from the base model."
        ]
    if start.run is not None:
        return []
    given = {"start.step": start.step, "start.take": start.take if start.take != "weights" else None}
    return [
        f"{key}={value} without start.run=; name the folder of the run to start from."
        for key, value in given.items()
        if value is not None
    ]
