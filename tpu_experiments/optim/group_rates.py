"""A learning rate of its own for each group of parameters, or for some by their names, around any optimizer."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from tpu_experiments.optim.base import Named, Optimizer, ParameterGroup, State


class GroupRates:
    """An optimizer that updates each group with its multiple of the learning rate.

    Weight decay is per unit of that learning rate. The groups have all parameters together.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[ParameterGroup]) -> None:
        self.optimizer, self.groups = optimizer, groups

    def init(self, parameters: Named) -> State:
        return self.optimizer.init(parameters)

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        groups = [(self.optimizer, group.names, lr * group.rate) for group in self.groups]
        return update_in_groups(parameters, grads, state, groups=groups)


class PartRate:
    """An optimizer that updates parameters whose names have certain ends with `ratio` times the learning rate.

    Weight decay is per unit of that learning rate.
    """

    ends: tuple[str, ...]

    def __init__(self, optimizer: Optimizer, *, ratio: float) -> None:
        self.optimizer, self.ratio = optimizer, ratio

    def init(self, parameters: Named) -> State:
        return self.optimizer.init(parameters)

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        groups = [
            (self.optimizer, [name for name in parameters if name.endswith(self.ends) == is_part], rate)
            for is_part, rate in ((False, lr), (True, lr * self.ratio))
        ]
        return update_in_groups(parameters, grads, state, groups=groups)


def with_group_rates(optimizer: Optimizer, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Return the optimizer, with rates by group where one is not 1."""
    return GroupRates(optimizer, groups) if any(group.rate != 1 for group in groups) else optimizer


def update_in_groups(
    parameters: Named, grads: Named, state: State, *, groups: Iterable[tuple[Optimizer, Sequence[str], Tensor]]
) -> tuple[dict[str, Tensor], State]:
    """Return new parameters and state, updated group by group, each by its optimizer with its learning rate (1,)."""
    new_parameters: dict[str, Tensor] = {}
    new_state: State = {}
    for optimizer, names, rate in groups:
        moved, made = optimizer.update(
            {name: parameters[name] for name in names},
            {name: grads[name] for name in names},
            {"": state[""]} | {name: state[name] for name in names},
            lr=rate,
        )
        new_parameters |= moved
        new_state |= made
    return new_parameters, new_state
