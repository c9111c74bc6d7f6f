"""Which parameters a stage updates: numbers of its batches, so that stages with other choices share one program.

The numbers are one for each parameter, for a stack one for each layer, in the order of the parameters: 1 or 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack

TRAINS = "trains"
"""Name of the numbers in a batch, float32 (N,); where it has none, every parameter is updated."""


def choice_of(patterns: Sequence[str], names: Iterable[str], *, stages: Iterable[Stage]) -> dict[str, Tensor]:
    """Return the trainable mask of every batch; empty where every stage trains all parameters."""
    trains = trains_of(patterns, names, stages=stages)
    return {} if trains is None else {TRAINS: trains}


def trains_of(patterns: Sequence[str], names: Iterable[str], *, stages: Iterable[Stage]) -> Tensor | None:
    """Return the trainable mask, float32 (N,), of a stage; None where every stage trains all parameters."""
    if not any(stage.trainable for stage in stages):
        return None
    parts = [part for name in names for part in hugging_face_names(name)]
    return torch.tensor([float(not patterns or _is_chosen(part, patterns)) for part in parts])


def require_choices(stages: Iterable[Stage], names: Sequence[str]) -> None:
    """Require every pattern of a stage to match a trainable parameter by its Hugging Face name.

    Raises:
        ConfigError: one matches none.
    """
    for stage in stages:
        for pattern in stage.trainable:
            if not any(_is_chosen(name, [pattern]) for name in names):
                raise ConfigError(
                    f"curriculum.stages.{stage.name}.trainable has {pattern!r}, which matches none of the "
                    f"{len(names)} trainable parameters, {names[0]} and so on. {suggest(pattern, names)}"
                )


def by_parameter(trains_N: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return boolean masks per parameter that broadcast with it and its optimizer state."""
    masks, start = {}, 0
    for name, parameter in parameters.items():
        count = len(hugging_face_names(name))
        own = trains_N[start : start + count] > 0
        masks[name] = own.view(count, *[1] * (parameter.ndim - 1)) if is_stack(name) else own.view(())
        start += count
    return masks


def _is_chosen(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
