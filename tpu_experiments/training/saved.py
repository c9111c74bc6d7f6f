"""What a run trains, from its start to a checkpoint and back: under Hugging Face's names, folded or not."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tpu_experiments.checkpoint.store import load_latest
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.io import paths
from tpu_experiments.io.tensor_file import described
from tpu_experiments.optim.base import Optimizer, State
from tpu_experiments.runtime.reading import host_copy
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack, stacked, unstacked
from tpu_experiments.training.progress import Progress

PARAMETERS, OPTIMIZER = "parameters", "optimizer"


@dataclass(frozen=True)
class Snapshot:
    """Everything that changes, as it was after some step: copies in the host's memory."""

    progress: Progress
    groups: dict[str, dict[str, Tensor]]
    """`optimizer` and `parameters`, written in this order."""


def zero_state(optimizer: Optimizer, parameters: Mapping[str, Tensor], *, zeros: Callable[..., Tensor]) -> State:
    """Optimizer state at its start, each slot made by `zeros(shape, name=)`."""
    shapes = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
    return {
        name: {slot: zeros(t.shape, name=f"{name}/{slot}") for slot, t in slots.items()}
        for name, slots in optimizer.init(shapes).items()
    }


def snapshot(progress: Progress, *, parameters: Mapping[str, Tensor], state: State) -> Snapshot:
    """A copy of what the next step will change; waits for the device."""
    groups = {OPTIMIZER: to_host(flat(state)), PARAMETERS: to_host(parameters)}
    return Snapshot(Progress.from_dict(progress.to_dict()), groups)


def read_state(
    folder: str,
    *,
    parameters: dict[str, Tensor],
    state: State,
    place: Callable[..., Tensor],
    before: int | None = None,
) -> Progress | None:
    """Put the newest complete checkpoint (of a step below `before`) where the run's own tensors are; None when there is
    none.

    Raises:
        ConfigError: it has other tensors than the run.
    """
    found = load_latest(folder, before=before)
    if found is None:
        return None
    values, groups = found
    try:
        progress = Progress.from_dict(values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder}; progress.json of its newest checkpoint is not what this program writes ({error}); it is from "
            "another version of it, or was changed: choose another name=, or remove that checkpoint."
        ) from error
    place_of = f"{paths.join(folder, f'step_{progress.step:08d}')}"
    require_tensors(groups.get(PARAMETERS, {}), shapes_of(parameters), place=f"{place_of}/{PARAMETERS}.safetensors")
    require_tensors(groups.get(OPTIMIZER, {}), shapes_of(flat(state)), place=f"{place_of}/{OPTIMIZER}.safetensors")
    from_host(groups, parameters=parameters, state=state, place=place)
    return progress


def flat(state: State) -> dict[str, Tensor]:
    """Optimizer state by `<parameter>/<slot>`."""
    return {f"{name}/{slot}": t for name, slots in state.items() for slot, t in slots.items()}


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, contiguous; a tensor that lies there already is copied too."""
    copies = {name: host_copy(t) for name, t in tensors.items()}
    return {name: t.contiguous() for name, t in unstacked(copies).items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without values, under Hugging Face's names, of the types and shapes that a checkpoint must have."""
    return {
        part: torch.empty(t.shape[1:] if is_stack(name) else t.shape, dtype=t.dtype, device="meta")
        for name, t in tensors.items()
        for part in hugging_face_names(name)
    }


def require_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, place: str) -> None:
    """Compare a checkpoint's tensors with those of this run, by name, type and shape.

    Raises:
        ConfigError: they differ; the first one is named with both shapes.
    """
    advice = "it is the checkpoint of another run, or was changed; choose another name=, or remove that checkpoint."
    missing, extra = _missing(expected, found), _missing(found, expected)
    if missing or extra:
        raise ConfigError(
            f"{place}; it lacks {len(missing)} tensors of this run{_first(missing)} and has {len(extra)} that this run "
            f"has not{_first(extra)}; {advice}"
        )
    for name, tensor in expected.items():
        if described(found[name]) != described(tensor):
            raise ConfigError(f"{place}; {name} is {described(found[name])}, and {described(tensor)} here; {advice}")


def from_host(
    groups: Mapping[str, Mapping[str, Tensor]],
    *,
    parameters: dict[str, Tensor],
    state: State,
    place: Callable[..., Tensor],
) -> None:
    """Put the tensors of a checkpoint (`parameters`, `optimizer`) where the run's own are."""
    for name in parameters:
        parameters[name] = place(stacked(groups[PARAMETERS], name), name=name)
    for name, slots in state.items():
        for slot in slots:
            key = f"{name}/{slot}"
            slots[slot] = place(stacked(groups[OPTIMIZER], key), name=key)


def _missing(names: Iterable[str], present: Mapping[str, Tensor]) -> list[str]:
    return [name for name in names if name not in present]


def _first(names: list[str]) -> str:
    return f" (first {names[0][:200]})" if names else ""
