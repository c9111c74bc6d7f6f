"""The moving average of the parameters: its arithmetic, its state, and that evaluations and exports are of it."""

import dataclasses

import pytest
import torch
from torch.optim.swa_utils import get_ema_avg_fn

from tests.config.composing import composed
from tests.training.tiny import configured
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity, require_same
from tpu_experiments.optim.ema import LAG, Averages

DECAY, NUM_STEPS = 0.8, 60


def trained(config, *, num_steps: int, start=None):
    """Parameters of every step, from the start on, and the last state."""
    parameters = start or {"model.layers.0:2:1.w": torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))}
    updates = configured(config)(parameters)
    state, all_steps = updates.init(parameters), [parameters]
    for step in range(num_steps):
        grads = {name: torch.sin(p * (step + 1)) for name, p in parameters.items()}
        parameters, state = updates.update(parameters, grads, state, lr=torch.tensor([0.05]))
        all_steps.append(parameters)
    return all_steps, state


@pytest.mark.parametrize("optim", ["adamw", "adafactor", "adamw8bit"])
def test_it_is_torchs_average_of_the_parameters_that_training_has_without_it(optim: str) -> None:
    """In float64, with the decay of each update; 60 steps reach the constant decay after (1 + n) / (10 + n) is it."""
    plain = composed("model=tiny", f"optim={optim}")
    averaged = dataclasses.replace(plain, optim=dataclasses.replace(plain.optim, ema=DECAY))
    expected, _ = trained(plain, num_steps=NUM_STEPS)
    found, state = trained(averaged, num_steps=NUM_STEPS)
    (name,) = found[-1]
    assert torch.equal(found[-1][name], expected[-1][name]), "training itself is unchanged"
    average = expected[0][name].double()
    for n, parameters in enumerate(expected[1:], start=1):
        decay = min(DECAY, (1 + n) / (10 + n))
        average = get_ema_avg_fn(decay)(average, parameters[name].double(), torch.tensor(n))
    assert (1 + NUM_STEPS) / (10 + NUM_STEPS) > DECAY
    assert float((average - found[-1][name]).abs().max()) > 1e-3
    torch.testing.assert_close(Averages(found[-1], state)[name].double(), average, atol=1e-6, rtol=0)


def test_zero_state_is_a_copy_of_the_parameters() -> None:
    parameters = {"w": torch.randn(3, 4)}
    updates = configured(composed("model=tiny", "optim.ema=0.999"))(parameters)
    averages = Averages(parameters, updates.init(parameters))
    assert torch.equal(averages["w"], parameters["w"])
    assert set(averages.held) == {"w", f"w/{LAG}"}


def test_another_decay_is_another_run() -> None:
    config = composed("model=tiny", "optim.ema=0.99")
    stored = identity(config)
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, ema=0.999))
    with pytest.raises(ConfigError, match=r"optim.ema=0.99, now 0.999"):
        require_same(stored, other, folder="outputs/run")
