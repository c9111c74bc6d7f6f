"""How often a run's programs are traced: replay is for this project's own steps alone."""

import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.tracing import REPLAY_STEPS, trace_interval

UNROLLED = ("hw=v6e8", "model=mistral7b", "model.stack=unrolled")
OWN_CODE = {
    "trainer": ("plugins=[tests]", "trainer._target_=tests.training.tiny.Run"),
    "optimizer": ("plugins=[tests]", "optim._target_=tests.training.tiny.Run"),
    "model": ("plugins=[tests]", "model._target_=tests.training.tiny.Run"),
    "plugin": ("plugins=[tests]",),
    "checkpoint": ("model.remote_code=run",),
}


@pytest.mark.parametrize(
    ("overrides", "interval"),
    [
        ((), REPLAY_STEPS),
        (("hw=v6e8", "model=mistral7b"), 1),
        (UNROLLED, REPLAY_STEPS),
        (("hw=v6e8", "model=mistral7b", "objective=grpo", "reward=number", "data=gsm8k"), REPLAY_STEPS),
        ((*UNROLLED, "trainer.trace_every_steps=500"), 500),
        ((*UNROLLED, "trainer.trace_every_steps=1"), 1),
    ],
)
def test_folded_layers_on_a_tpu_are_traced_and_others_replayed(overrides, interval):
    assert trace_interval(composed(*overrides)) == interval


@pytest.mark.parametrize("code", OWN_CODE.values(), ids=OWN_CODE)
@pytest.mark.parametrize("place", [(), UNROLLED], ids=["cpu", "unrolled"])
def test_code_of_ones_own_is_traced_at_every_step(code, place):
    assert trace_interval(composed(*place, *code)) == 1
    assert trace_interval(composed(*place, *code, "trainer.trace_every_steps=1")) == 1


@pytest.mark.parametrize("code", OWN_CODE.values(), ids=OWN_CODE)
def test_replay_of_code_of_ones_own_is_refused(code):
    with pytest.raises(
        ConfigError, match=r"trainer.trace_every_steps=50 with .*; steps with code of your own are traced"
    ):
        composed(*code, "trainer.trace_every_steps=50")
