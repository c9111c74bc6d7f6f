"""Gradients of a bf16 model are float32 from the product on: none is rounded before they are summed."""

import pytest
import torch

from tests.tiers import only
from tests.training.tiny import ARCHITECTURES, Run, random_batch
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.ops import Folding, HostMemory, python_loop, unconstrained

pytestmark = pytest.mark.xla  # autograd must know of the XLA device before the first backward pass of a process
SETTINGS = [
    "hw.runtime=eager",
    "model.size=tiny",
    "model.dtype=bfloat16",
    "model.attention=eager",
    "trainer.loss_chunk_tokens=32",
]


def gradients(make_config, *overrides: str) -> dict[str, torch.Tensor]:
    """Of one batch, B drawn instead of zero: a zero B has A a zero gradient."""
    config = make_config(*SETTINGS, *overrides)
    runtime = EagerRuntime(config.hw)
    runtime.folding = Folding(python_loop, unconstrained, lambda name, shape: (None,) * len(shape), HostMemory())
    run = Run(config, runtime)
    generator = torch.Generator().manual_seed(1)
    for name, p in run.parameters.items():
        if name.endswith("lora_B"):
            p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    batch = random_batch(0)
    batch["ids"] = batch["ids"] % 7  # the gradient of an embedding that is used once is a bf16 number
    found, _ = run.step.gradients(run.parameters, batch, torch.tensor(50.0))
    return dict(zip(run.parameters, found, strict=True))


def share_of_bf16(tensor: torch.Tensor) -> float:
    """Of the numbers that are not zero, those that bf16 can write: 1 of what was rounded, 2**-16 of what was not."""
    values = tensor[tensor != 0]
    return (values.bfloat16().float() == values).float().mean().item()


@pytest.mark.parametrize("stack", ["scanned", "unrolled"])
@pytest.mark.parametrize("lora", ["all_linear_r8", "none"])
@pytest.mark.parametrize("model", only(["gemma3_270m"], ARCHITECTURES))
def test_no_gradient_was_rounded_to_bf16(make_config, model, lora, stack):
    found = gradients(make_config, f"model={model}", f"lora={lora}", f"model.stack={stack}")
    exact = gradients(make_config, f"model={model}", f"lora={lora}", f"model.stack={stack}", "model.dtype=float32")
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    likeness = {name: torch.cosine_similarity(grad.flatten(), exact[name].flatten(), 0) for name, grad in found.items()}
    assert min(likeness.values()) > 0.99, likeness
    rounded = {name: share for name, grad in found.items() if (share := share_of_bf16(grad)) > 0.1}
    assert not rounded


@pytest.mark.parametrize("stack", ["scanned", pytest.param("unrolled", marks=pytest.mark.slow)])
def test_no_gradient_of_a_length_was_rounded_to_bf16(make_config, stack):
    """In a model of bf16, they are summed over the tokens in float32."""
    found = gradients(make_config, "model=qwen05b", "lora=all_linear_r8", "lora.dora=true", f"model.stack={stack}")
    lengths = {name: grad for name, grad in found.items() if name.endswith("lora_magnitude_vector")}
    assert len(lengths) == 7 * (1 if stack == "scanned" else 2)
    assert {grad.dtype for grad in lengths.values()} == {torch.float32}
    assert max(map(share_of_bf16, lengths.values())) < 0.1
