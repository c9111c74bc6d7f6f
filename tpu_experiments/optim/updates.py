"""Updates of the parameters: any optimizer with the facts of each parameter, and what is kept beside its state."""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config, OptimConfig
from tpu_experiments.config.targets import locate
from tpu_experiments.optim.base import Named, Optimizer, ParameterGroup, State, clip, global_norm
from tpu_experiments.optim.ema import LAG, next_lags
from tpu_experiments.optim.facts import Facts, facts_of
from tpu_experiments.optim.loss_scale import GOOD, SCALE
from tpu_experiments.optim.schedule_free import PEAK, WEIGHTS, ScheduleFreeAdamW, averaged

DECAY = "weight_decay"
"""Slot of the entry `""`, shape (1,), and key of the stage's decay in a batch, where a stage has one of its own. A
number would be part of the compiled step, so that each stage would compile its own program."""


@dataclass(frozen=True)
class Updates:
    """An optimizer, the facts of every parameter, and the slots that the step has beside the optimizer's."""

    optimizer: Optimizer
    facts: Mapping[str, Facts]
    weight_decay: float | None
    """Per unit of a parameter's learning rate; None is the stage's, in the state."""
    ema: float = 0.0
    """Decay of the parameters' moving average (optim/ema.py); 0 keeps none."""
    is_scaled: bool = False
    """Whether the state has a loss scale, which `training/step.py` applies and adapts."""

    @property
    def is_schedule_free(self) -> bool:
        """Return whether the optimizer's steps are averaged (optim/schedule_free.py)."""
        return isinstance(self.optimizer, ScheduleFreeAdamW)

    def init(self, parameters: Named) -> State:
        """Return the zero state on the parameters' device; on the meta device it has shapes only."""
        state = self.optimizer.init(parameters)
        if self.ema or self.is_schedule_free:
            for name, p in parameters.items():
                state[name] = {**state[name], LAG: torch.zeros_like(p, dtype=torch.float32)}
        beside = ((DECAY,) if self.weight_decay is None else ()) + ((SCALE, GOOD) if self.is_scaled else ())
        beside += (PEAK, WEIGHTS) if self.is_schedule_free else ()
        return {**state, "": {**state[""], **{slot: torch.zeros(1) for slot in beside}}}

    def clipped(self, grads: Named, *, norm: Tensor) -> Named:
        """Return the gradients scaled to at most the limit of each group; `norm` is that of all together."""
        groups: dict[int, dict[str, Tensor]] = {}
        for name, grad in grads.items():
            groups.setdefault(self.facts[name].group, {})[name] = grad
        found: dict[str, Tensor] = {}
        for own in groups.values():
            limit = self.facts[next(iter(own))].clip_norm
            found |= clip(own, norm=norm if len(groups) == 1 else global_norm(own), limit=limit)
        return {name: found[name] for name in grads}

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        """Return the new parameters and the new state; `lr` has shape (1,).

        A stage's decay comes after an update without one: less lr * decay * p of every parameter that decays, which is
        what AdamW and Adafactor compute themselves. The loss scale stays as it is.
        """
        beside = {slot: state[""][slot] for slot in (DECAY, SCALE, GOOD, PEAK, WEIGHTS) if slot in state[""]}
        shared = {slot: tensor for slot, tensor in state[""].items() if slot not in beside}
        move, sign = self.optimizer.update, -1
        if isinstance(self.optimizer, ScheduleFreeAdamW):
            move, sign = self.optimizer.steps, 1  # `new_parameters` are steps, before minus after
        rates: dict[tuple[float, ...], list[str]] = {}
        for name in parameters:
            rates.setdefault(self.facts[name].factors, []).append(name)
        new_parameters: dict[str, Tensor] = {}
        new_state: State = {}
        for factors, names in rates.items():
            rate = functools.reduce(operator.mul, factors, lr)
            moved, made = move(
                {name: parameters[name] for name in names},
                {name: grads[name] for name in names},
                {"": shared} | {name: {slot: t for slot, t in state[name].items() if slot != LAG} for name in names},
                lr=rate,
                decay={name: (self.weight_decay or 0.0) if self.facts[name].decays else 0.0 for name in names},
            )
            if DECAY in beside:
                decaying = [name for name in names if self.facts[name].decays]
                moved |= {name: moved[name] + sign * rate * beside[DECAY] * parameters[name] for name in decaying}
            new_parameters |= moved
            new_state |= made
        if isinstance(self.optimizer, ScheduleFreeAdamW):
            steps, beta1 = new_parameters, self.optimizer.beta1
            new_parameters, lags, slots = averaged(state, parameters, steps, lr=lr, beta1=beta1)
            new_state |= {name: {**new_state[name], LAG: lag} for name, lag in lags.items()}
            beside |= slots
        elif self.ema:
            count = new_state[""]["count"]
            lags = next_lags(state, parameters, new_parameters, num_updates=count, decay=self.ema)
            new_state |= {name: {**new_state[name], LAG: lag} for name, lag in lags.items()}
        return new_parameters, {**new_state, "": {**new_state[""], **beside}}


def with_decay(state: State, decay: Tensor) -> State:
    """Return the state with this decay, shape (1,), for the next update."""
    return {**state, "": {**state[""], DECAY: decay}}


def optimizer_of(config: Config) -> Optimizer:
    """Make the optimizer that `optim._target_` names, with its own settings and `optim.options`.

    Raises:
        ConfigError: the class does not accept them, or its `update` not what it is given.
    """
    common = {field.name for field in fields(OptimConfig)}
    settings = {name: value for name, value in asdict(config.optim).items() if name not in common}
    settings |= settings.pop("options", {})
    kind = locate(config.optim._target_, key="optim")
    try:
        inspect.signature(kind).bind(**settings)
        inspect.signature(kind.update).bind(None, {}, {}, {}, lr=None, decay={})
    except TypeError as error:
        raise ConfigError(
            f"optim._target_={config.optim._target_} with {settings}; {kind.__name__} says: {error}; it takes "
            "optim.options by name, and its update(parameters, grads, state, *, lr, decay) what "
            "tpu_experiments/optim/base.py says."
        ) from error
    optimizer: Optimizer = kind(**settings)
    return optimizer


def state_bytes_of(config: Config) -> Callable[[tuple[int, ...]], float]:
    """Return the bytes of the optimizer's state of one parameter by its shape, from tensors on the meta device."""
    optimizer = optimizer_of(config)

    @functools.cache
    def state_bytes(shape: tuple[int, ...]) -> float:
        state = optimizer.init({"weight": torch.empty(shape, device="meta")})
        return float(sum(tensor.nbytes for tensor in state["weight"].values()))

    return state_bytes


def updates_of(
    config: Config,
    parameters: Named,
    *,
    optimizer: Optimizer | None = None,
    groups: Sequence[ParameterGroup] = (),
) -> Updates:
    """Make the updates of a run.

    Args:
        optimizer: a custom trainer's; None is that of `optim`.
        groups: of an objective (facts.py).
    """
    made = optimizer or optimizer_of(config)
    if isinstance(made, ScheduleFreeAdamW) != (config.optim.is_averaged and not config.optim.ema):
        raise ConfigError(
            f"optim._target_={config.optim._target_}, and the run's optimizer is {type(made).__name__}; one of them "
            "averages parameters (optim/schedule_free.py) and the other does not; use optim=schedule_free_adamw with "
            "that optimizer alone."
        )
    of_stages = any(stage.weight_decay is not None for stage in config.curriculum.stages.values())
    return Updates(
        made,
        facts_of(config.optim, parameters, groups=groups),
        weight_decay=None if of_stages else config.optim.weight_decay,
        ema=config.optim.ema,
        is_scaled=config.model.dtype == "float16",
    )
