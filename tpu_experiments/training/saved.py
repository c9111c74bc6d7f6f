"""What a run trains, on its way to a checkpoint and back: under Hugging Face's names, folded or not."""

from collections.abc import Callable, Mapping

from torch import Tensor

from tpu_experiments.optim.base import State
from tpu_experiments.runtime.stacked import stacked, unstacked


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
