"""The same step in plain torch and on torch_xla's CPU device gives the same numbers from the same programs."""

import pytest
import torch

from tests.tiers import only
from tests.training.tiny import ARCHITECTURES, Run, random_batch
from tpu_experiments.runtime.stacked import unstacked

pytestmark = pytest.mark.xla
NUM_STEPS = 20


@pytest.fixture
def xla(make_config):
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config()
    return XlaRuntime(config.hw, sharding=config.sharding)


@pytest.fixture
def eager(make_config):
    from tpu_experiments.runtime.eager import EagerRuntime

    return EagerRuntime(make_config("hw.runtime=eager").hw)


@pytest.mark.parametrize("model", only(["qwen05b"], ARCHITECTURES))
def test_twenty_steps_agree_eager_and_xla(make_config, xla, eager, model):
    config = make_config(f"model={model}", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")
    batches = [random_batch(i, accumulation=2, rows=2) for i in range(NUM_STEPS)]
    on_xla, plain = Run(config, xla), Run(config, eager)
    difference = torch.tensor(on_xla.losses(batches)) - torch.tensor(plain.losses(batches))
    assert difference.abs().max() < 1e-5
    ours = unstacked({name: value.cpu() for name, value in on_xla.parameters.items()})
    assert ours.keys() == plain.parameters.keys()
    for name, value in plain.parameters.items():
        torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=0)
