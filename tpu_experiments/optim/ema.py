"""Exponential moving average of the parameters, kept in the optimizer's state.

The average begins as a copy of the parameters and follows avg <- d avg + (1 - d) p after every update, with
d = min(decay, (1 + n) / (10 + n)) at update n, as TensorFlow's ExponentialMovingAverage with `num_updates`: otherwise a
run of 1 / (1 - decay) steps would end with a third of the random weights that it began with.
The state has the difference `average - parameter` in the slot `LAG`. Its zero is a copy of the parameters, so that
state begins as zeros like every other slot, also where a stage resets the optimizer.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tpu_experiments.optim.base import Named, State

LAG = "average_lag"
"""Slot of every parameter: its average minus itself, float32 in the parameter's shape."""


def next_lags(state: State, before: Named, after: Named, *, num_updates: Tensor, decay: float) -> dict[str, Tensor]:
    """Return the averages minus the parameters after update `num_updates`, shape (1,), from the state before it."""
    own = torch.clamp((1 + num_updates) / (10 + num_updates), max=decay)
    # d avg + (1 - d) p' - p' = d (avg - p'), and avg = lag + p.
    return {name: own * (state[name][LAG] + (p - after[name])) for name, p in before.items()}


class Averages(Mapping[str, Tensor]):
    """View of the averages of a run's parameters, computed from parameters and state when one is read."""

    def __init__(self, parameters: Named, state: State) -> None:
        self._parameters, self._state = parameters, state

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name] + self._state[name][LAG]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def held(self) -> dict[str, Tensor]:
        """Return the tensors that the averages are computed from, by name."""
        return {**self._parameters, **{f"{name}/{LAG}": self._state[name][LAG] for name in self._parameters}}


def held_of(parameters: Named) -> Named:
    """Return the device's own tensors behind parameters, or a view of such with an attribute `held`, by name."""
    held: Named = getattr(parameters, "held", parameters)
    return held
