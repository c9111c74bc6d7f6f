"""What TorchTPU lowers, executed on the CPU through XLA's client, computes what plain torch does.

These run in the environment of launch/requirements-torchtpu.lock: `pytest -m torchtpu`.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.kernels.integers import int8_product
from tpu_experiments.runtime.ops import Folding, Loop, python_loop

if find_spec("torch_tpu") is None:
    pytest.skip("needs torch_tpu, in an environment of its own (launch/README.md)", allow_module_level=True)

from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.tpu.tracing import TracingRuntime, as_function_of
from tpu_experiments.tasks.plan import programs

# torch_tpu warns that its names are experimental, and of a memory allocator that is not loaded.
pytestmark = [pytest.mark.torchtpu, pytest.mark.filterwarnings("ignore::UserWarning")]
STEPS, LEARNING_RATE = 5, 1e-3


class HostRuntime(TracingRuntime):
    """The same runtime with tensors of the host, whose numbers depend on their names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = torch.device("cpu")
        self.loop: Loop = python_loop
        self.folding = Folding(python_loop)

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        made = torch.randn(tensor.shape, generator=generator) * 0.2  # smaller ones have gradients near rounding
        if name.endswith("norm.weight"):
            made = 1 + made
        if "/" in name:  # optimizer state
            made = torch.zeros(tensor.shape)
        made = made.to(tensor.dtype)
        self.placed.append((name, made))
        return made


def executed(lowered: Lowered) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    """The program on the CPU, as a function of its arguments by name."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    device = jax.devices("cpu")[0]
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=np.zeros((1, 1), int))
    with mlir.make_ir_context():
        module = ir.Module.parse(lowered.module)
        program = device.client.compile_and_load(module, xla_client.DeviceList((device,)), options)

    def run(values: Mapping[str, Tensor]) -> list[Tensor]:
        given = [jax.device_put(values[argument.name].numpy(), device) for argument in lowered.arguments]
        found = program.execute_sharded(given).disassemble_into_single_device_arrays()
        return [torch.from_numpy(np.array(parts[0])) for parts in found]

    return run


def batch_of(like: Mapping[str, Tensor], *, step: int, vocab_size: int) -> dict[str, Tensor]:
    """A batch whose rows hold two documents, with targets everywhere."""
    generator = torch.Generator().manual_seed(step)
    made: dict[str, Tensor] = {}
    for name, tensor in like.items():
        length = tensor.shape[-1] if tensor.ndim else 1
        places = torch.arange(length, dtype=torch.int32)
        if name == "ids":
            made[name] = torch.randint(3, vocab_size, tensor.shape, generator=generator, dtype=torch.int32)
        elif name == "segments":
            made[name] = (1 + (places >= length // 2).int()).expand(tensor.shape).contiguous()
        elif name == "positions":
            made[name] = (places % (length // 2)).expand(tensor.shape).contiguous()
        elif tensor.dtype == torch.int32:
            made[name] = torch.ones(tensor.shape, dtype=torch.int32)
        else:
            made[name] = torch.full(tensor.shape, LEARNING_RATE if name == "lr" else 1.0)
    return made


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=tiny",),
        ("model=tiny", "model.stack=unrolled", "trainer.micro_batch_rows=2"),
        ("model=gemma3_270m", "model.size=tiny", "lora.dropout=0.1", "model.dtype=float32"),
        ("model=qwen05b", "model.size=tiny", "model.dtype=float32"),
    ],
    ids=["folded", "unrolled, micro-batches", "Gemma 3, dropout", "Qwen2"],
)
def test_five_steps_are_those_of_plain_torch(overrides: tuple[str, ...]) -> None:
    shape = ("trainer.seq_len=64", "trainer.global_batch_rows=4", "data=sample_text", "curriculum=single")
    config = composed(
        *("task=plan", "hw=v6e1", "hw.runtime=torchtpu", "model.attention=sdpa"),
        *shape,
        *overrides,
        "model.init=random",
    )
    planned = programs.planned_trainer(config, TracingRuntime(config.hw, sharding=config.sharding))
    planned.build()
    geometry = programs.shape_of(planned.inputs.stages[0], runtime=planned.runtime)
    lowered = programs.lowered_step(planned, shape=geometry)
    compute = executed(lowered)
    host = programs.planned_trainer(config, HostRuntime(config.hw, sharding=config.sharding))
    host.build()
    values = {name: tensor.detach() for name, tensor in host.runtime.placed}
    like = programs.batch_like(geometry, config=config) | programs.added_like(host)
    parameters, state = host.parameters, host.state
    for step in range(STEPS):
        batch = batch_of(like, step=step, vocab_size=300)
        found = compute({**values, **{f"batch/{name}": tensor for name, tensor in batch.items()}})
        parameters, state, report = host.step(parameters, state, batch)
        renewed = {**parameters, **{f"{n}/{slot}": t for n, slots in state.items() for slot, t in slots.items()}}
        for name, ours in zip(renewed, found, strict=False):
            theirs = renewed[name].detach()
            is_far = ~torch.isclose(ours, theirs, rtol=1e-5, atol=1e-5)
            # Adam divides a gradient by its size: one at rounding (1e-8) decides a step of a learning rate.
            assert is_far.sum() <= (0 if "/" in name else ours.numel() / 200), (
                f"{name}, step {step}: {int(is_far.sum())} numbers differ"
            )
            assert (ours - theirs).abs().max() <= 2 * LEARNING_RATE
            values[name] = theirs
        losses = [t for t in found[len(renewed) :] if t.ndim == 0]
        assert any(torch.isclose(loss, report.loss.detach(), rtol=1e-5) for loss in losses)


def test_an_operator_that_is_not_lowered_yet_is_refused() -> None:
    x, weight = (torch.empty(shape, dtype=torch.int8, device="meta") for shape in ((8, 16), (4, 16)))
    graph = make_fx(lambda tensors: int8_product(*tensors, 1))([x, weight])
    with pytest.raises(ConfigError, match=r"hw\.runtime=torchtpu; the program calls tpu_experiments\.int8_product"):
        as_function_of(graph, [("x", x), ("weight", weight)])
