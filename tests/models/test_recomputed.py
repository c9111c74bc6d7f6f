"""Layers that plain torch computes again in the backward pass: the same bits, less memory, every policy."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.training.tiny import Run, random_batch
from tpu_experiments.config.model_schema import SAVED
from tpu_experiments.models.stack.recomputed import RecomputedLayers, is_recomputed
from tpu_experiments.runtime.eager import EagerRuntime

EAGER = ("model.size=tiny", "model.dtype=float32", "hw.runtime=eager")


@pytest.fixture
def gradients_of(make_config):
    """Row losses and gradients of one accumulated batch, and the run."""

    def compute(model: str, *overrides: str) -> tuple[Tensor, dict[str, Tensor], Run]:
        config = make_config(f"model={model}", *EAGER, *overrides)
        run = Run(config, EagerRuntime(config.hw))
        run.model.module.train()
        for name, parameter in run.parameters.items():  # B is zero at the start, and then A has no gradient
            if name.endswith("lora_B"):
                parameter.add_(0.01)
        batch = random_batch(0, accumulation=2, rows=2, dropout=config.lora.dropout)
        torch.manual_seed(0)
        grads, losses = run.step.gradients(run.parameters, batch, torch.ones(()))
        return losses, dict(zip(run.parameters, grads, strict=True)), run

    return compute


def assert_same(ours: tuple[Tensor, dict[str, Tensor], Run], plain: tuple[Tensor, dict[str, Tensor], Run]) -> None:
    assert is_recomputed(ours[2].model.module)
    assert not is_recomputed(plain[2].model.module)
    assert torch.equal(ours[0], plain[0])
    assert list(ours[1]) == list(plain[1])
    for name, expected in plain[1].items():
        assert expected.abs().max() > 0, name
        assert torch.equal(ours[1][name], expected), name


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("mistral7b", ["lora=all_linear_r8"]),
        ("qwen05b", ["lora=all_linear_r8", "lora.dropout=0.3"]),
        ("gemma3_270m", ["lora=all_linear_r8", "lora.dropout=0.3"]),
        ("mistral7b", ["lora=none"]),
        ("qwen05b", ["lora=none", "model.dtype=bfloat16"]),
        ("gemma3_270m", ["lora=none", "model.dtype=bfloat16"]),
        ("mistral7b", ["lora=all_linear_r8", "model.base=int8", "model.dtype=bfloat16"]),
        ("qwen05b", ["lora=all_linear_r8", "model.base=nf4", "lora.dropout=0.3"]),
        ("mistral7b", ["lora=all_linear_r8", "model.attention=eager"]),
        ("mistral7b", ["lora=all_linear_r8", "+model.tiny_arch.attention_dropout=0.5"]),  # of torch's generator
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_same_bits(gradients_of, model, overrides):
    plain = gradients_of(model, *overrides, "model.remat=none")
    assert_same(gradients_of(model, *overrides, "model.remat=layer_inputs"), plain)
    assert_same(gradients_of(model, *overrides, "model.remat=save_dots"), plain)


def saved_bytes(run: Run, batch: dict[str, Tensor]) -> int:
    """Bytes of distinct tensors that autograd holds at the end of a forward pass, weights left out."""
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.data_ptr()] = tensor
        return tensor

    weights = {p.data_ptr() for p in (*run.parameters.values(), *run.model.module.parameters()) if not p.is_meta}
    rows = {name: tensor[0] for name, tensor in batch.items() if name != "lr"}
    leaves = {name: p.detach().requires_grad_() for name, p in run.parameters.items()}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        sums, _ = run.step.row_loss(run.model.module, leaves, rows)
    assert sums.requires_grad
    return sum(t.nbytes for address, t in held.items() if address not in weights)


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        *(("mistral7b", remat) for remat in ("layer_inputs", "offload", "save_attention", "save_dots")),
        *(("phi4_mini", remat) for remat in ("layer_inputs", "save_dots")),
    ],
)
def test_every_policy_saves_its_values(gradients_of, model, remat):
    """Counted in calls of matrix products and attention: what is saved is not computed a second time."""
    more = ("lora=all_linear_r8", "lora.dropout=0.1")
    plain = gradients_of(model, *more, "model.remat=none")
    ours = gradients_of(model, *more, f"model.remat={remat}")
    assert_same(ours, plain)
    counts = calls(ours[2]), calls(plain[2])
    layers = len(ours[2].model.module.model.layers)
    again = {name: counts[0][name] - counts[1][name] for name in counts[0]}
    assert again["attention"] == (0 if "attention" in SAVED[remat] else layers)
    # The last as well, since a recomputation ends at the last tensor that the backward pass reads.
    num = {"mistral7b": 7, "phi4_mini": 4}[model]
    assert again["frozen"] == (0 if remat == "save_dots" else num * layers)


def calls(run: Run) -> dict[str, int]:
    """Calls of attention, and of products with the frozen weights, in one forward and backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted = {"attention": 0, "frozen": 0}
    sizes = {p.shape for p in run.model.module.parameters() if not p.is_meta and p.ndim == 2}
    frozen = {tuple(shape) for shape in sizes} | {tuple(reversed(shape)) for shape in sizes}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name()
            counted["attention"] += "attention" in name and "backward" not in name
            counted["frozen"] += name == "aten::mm" and tuple(args[1].shape) in frozen
            return func(*args, **(kwargs or {}))

    batch = random_batch(0, rows=2, dropout=0.1)
    with Counting():
        run.step.gradients(run.parameters, batch, torch.ones(()))
    return counted


def test_less_is_saved_and_names_are_the_same(gradients_of):
    more = ("lora=all_linear_r8", "model.tiny_arch.num_hidden_layers=4")
    found = {}
    for remat in ("layer_inputs", "none"):
        *_, run = gradients_of("mistral7b", *more, f"model.remat={remat}")
        names = [name for name, _ in run.model.module.named_parameters()]
        found[remat] = saved_bytes(run, random_batch(0, rows=2, seq_len=128)), names
    assert found["layer_inputs"][1] == found["none"][1]
    assert found["layer_inputs"][0] < found["none"][0] / 2


def test_unrolled_layers_save_everything(gradients_of):
    *_, run = gradients_of("qwen05b", "lora=all_linear_r8", "model.remat=layer_inputs", "model.stack=unrolled")
    assert not is_recomputed(run.model.module)


def test_inputs_of_layers_are_moved_to_host_memory(gradients_of, monkeypatch):
    """On a CPU the host is the device, so what is asked for is all that can be seen here."""
    from tpu_experiments.models.stack import recomputed

    asked = []
    own = recomputed.save_on_cpu
    monkeypatch.setattr(recomputed, "save_on_cpu", lambda **given: asked.append(given) or own(**given))
    *_, run = gradients_of("mistral7b", "lora=all_linear_r8", "model.remat=offload")
    layers = run.model.module.model.layers
    assert isinstance(layers, RecomputedLayers)
    assert asked == [{"pin_memory": False}] * (2 * len(layers))
