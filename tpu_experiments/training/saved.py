"""What a run trains, from its start to a checkpoint and back: under Hugging Face's names, folded or not."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tpu_experiments.checkpoint.store import load_latest, save_checkpoint
from tpu_experiments.optim.base import Optimizer, State
from tpu_experiments.runtime.stacked import stacked, unstacked
from tpu_experiments.training.progress import Progress


def zero_state(optimizer: Optimizer, parameters: Mapping[str, Tensor], *, zeros: Callable[..., Tensor]) -> State:
    """Optimizer state at its start, each slot made by `zeros(shape, name=)`."""
    shapes = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
    return {
        name: {slot: zeros(t.shape, name=f"{name}/{slot}") for slot, t in slots.items()}
        for name, slots in optimizer.init(shapes).items()
    }


def write_state(
    folder: str, *, progress: Progress, parameters: Mapping[str, Tensor], state: State, keep_last: int
) -> None:
    """A checkpoint of everything that changes; waits for the device."""
    save_checkpoint(
        folder,
        step=progress.step,
        groups={"parameters": to_host(parameters), "optimizer": to_host(flat(state))},
        progress=progress.to_dict(),
        keep_last=keep_last,
    )


def read_state(
    folder: str, *, parameters: dict[str, Tensor], state: State, place: Callable[..., Tensor]
) -> Progress | None:
    """Put the newest complete checkpoint where the run's own tensors are; None when there is none."""
    found = load_latest(folder)
    if found is None:
        return None
    values, tensors = found
    from_host(tensors, parameters=parameters, state=state, place=place)
    return Progress.from_dict(values)


def flat(state: State) -> dict[str, Tensor]:
    """Optimizer state by `<parameter>/<slot>`."""
    return {f"{name}/{slot}": t for name, slots in state.items() for slot, t in slots.items()}


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies, contiguous."""
    return {name: t.contiguous() for name, t in unstacked({n: t.detach().cpu() for n, t in tensors.items()}).items()}


def from_host(
    groups: Mapping[str, Mapping[str, Tensor]],
    *,
    parameters: dict[str, Tensor],
    state: State,
    place: Callable[..., Tensor],
) -> None:
    """Put the tensors of a checkpoint (`parameters`, `optimizer`) where the run's own are."""
    for name in parameters:
        parameters[name] = place(stacked(groups["parameters"], name), name=name)
    for name, slots in state.items():
        for slot in slots:
            key = f"{name}/{slot}"
            slots[slot] = place(stacked(groups["optimizer"], key), name=key)
