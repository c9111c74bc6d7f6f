"""Weights padded to hold their adapter compute what weight and adapter compute apart, and stay what they are."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_contracted import outcome, random
from tests.training.tiny import Run, built, random_batch
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.config.schema import Config
from tpu_experiments.models.adapters import padded
from tpu_experiments.models.adapters.layouts import OneProduct
from tpu_experiments.models.adapters.linear import Siblings
from tpu_experiments.models.adapters.padded import (
    PaddedLora,
    below,
    beside,
    fitting_padding,
    padded_adapters,
    padded_family,
    weights_with_adapters,
    with_adapters,
    with_low,
    with_padding,
)
from tpu_experiments.models.sources import build
from tpu_experiments.objectives.next_token import next_token_loss
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.kernels import on_xla  # registers the products of torch_xla's runs
from tpu_experiments.runtime.kernels.attention import BACKWARD, install_attention_kernel
from tpu_experiments.runtime.ops import widened, written
from tpu_experiments.runtime.stacked import unstacked
from tpu_experiments.runtime.xla import in_place  # noqa: F401  # registers what writes into tensors

pytestmark = pytest.mark.xla
PADDING = 32
WORDS = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "model.stack=unrolled")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 64 by 128 are padded too, as large ones are."""
    monkeypatch.setattr(padded, "MIN_FEATURES", 1)
    for module in (build, padded):
        monkeypatch.setattr(module, "PADDING", PADDING)


@pytest.fixture
def xla(make_config: Callable[..., Config]) -> Any:
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config()
    return XlaRuntime(config.hw, sharding=config.sharding)


@pytest.fixture
def eager(make_config: Callable[..., Config]) -> EagerRuntime:
    return EagerRuntime(make_config("hw.runtime=eager").hw)


def paddings(module: torch.nn.Module) -> dict[str, str]:
    """How the adapted weights of the first layer are padded."""
    adapters = [p for p in padded_adapters(module).values() if p.path.startswith("model.layers.0")]
    return {part.leaf: part.padding for part in adapters}


FORWARD = {leaf: "columns" for leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
"""What holds B, in loops and with dropout."""
FOLDED = FORWARD | {"down_proj": "rows"}
UNROLLED = FOLDED | {"k_proj": "both"}


# ---- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_loop", "holds_a"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_beside_is_weights_and_adapters(device: str, in_loop: bool, holds_a: bool) -> None:
    """Three adapters of different ranks and widths; A may lie below the second one's weight."""
    ranks, widths = [3, 2, 4], [15, 9, 12]
    x, a = random(2, 6, 8), random(sum(ranks), 8)
    tensors = [x, a, *(random(n, 8) for n in widths), *(random(n, r) for n, r in zip(widths, ranks, strict=True))]

    def ours(x: Tensor, a: Tensor, *both: Tensor) -> Tensor:
        weights, firsts, held = both[:3], [0, 3, 5], []
        for number, (weight, b, first) in enumerate(zip(weights, both[3:], firsts, strict=True)):
            wide = torch.cat([weight, F.pad(b.detach(), (first, PADDING - first - b.shape[1]))], 1)
            rows = F.pad(a.detach(), (0, PADDING, 0, PADDING - len(a)))
            held.append(torch.cat([wide, rows]) if holds_a and number == 1 else wide)
        joined, low = with_low(x.detach() if holds_a else x, a, parts=0)
        return torch.cat(beside(joined, x, low, held, both[3:], parts=0, in_loop=in_loop), -1)

    def apart(x: Tensor, a: Tensor, *both: Tensor) -> Tensor:
        lows = F.linear(x, a).split(ranks, dim=-1)
        return torch.cat(
            [F.linear(x, w) + F.linear(low, b) for w, b, low in zip(both[:3], both[3:], lows, strict=True)], -1
        )

    of = [0, 1, 5, 6, 7]
    for found, expected in zip(
        outcome(ours, tensors, torch.device(device), of=of),
        outcome(apart, tensors, torch.device("cpu"), of=of),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_below_is_a_weight_and_an_adapter(device: str) -> None:
    x, weight, a = random(2, 6, 8), random(15, 8), random(2, 8)

    def ours(x: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        held = torch.cat([weight, F.pad(a.detach(), (0, 0, 0, PADDING - len(a)))])
        return torch.cat(below(x, held, a, outputs=15, parts=0), -1)

    def apart(x: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return torch.cat([F.linear(x, weight), F.linear(x, a)], -1)

    for found, expected in zip(
        outcome(ours, [x, weight, a], torch.device(device), of=[0, 2]),
        outcome(apart, [x, weight, a], torch.device("cpu"), of=[0, 2]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_shared", [True, False])
def test_siblings_may_read_tensors_of_their_own(is_shared: bool) -> None:
    """Each one's values are then multiplied by its own columns all the same."""
    layers = [
        OneProduct(torch.nn.Linear(64, 128, bias=False), r=4, scale=2.0, dropout=0.0, name=f"layers.0.mlp.{leaf}")
        for leaf in ("gate_proj", "up_proj")
    ]
    Siblings.link([*layers])
    for layer in layers:
        layer.lora_A.data, layer.lora_B.data = random(4, 64), random(128, 4)
    xs = [random(2, 3, 64)] * 2 if is_shared else [random(2, 3, 64), random(2, 3, 64) + 1]
    expected = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    family = [(layer, f"layers.0.mlp.{layer.leaf}", fitting_padding(layer, in_loop=False)) for layer in layers]
    layers, held = padded_family(family), {}
    for layer in layers:
        values = layer.values(lambda owner, part: owner.get_parameter(part).detach())
        held[layer.path] = with_padding(F.pad(layer.weight.detach(), (0, PADDING)), values)
    with with_adapters(held):
        found = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    assert not weights_with_adapters()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    first, second = layers
    with with_adapters(held):
        first(xs[0] + 1)
    first(xs[1])  # by its own weights, while a product of the other tensor waits for the second
    with with_adapters(held):
        torch.testing.assert_close(second(xs[1]), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_what_is_written_is_there_and_all_else_as_it_was(device: str) -> None:
    x, part, on = random(2, 3, 5), random(1, 2, 4), torch.device(device)
    wide = widened(x.to(on), 4, 0)
    assert torch.equal(wide.cpu(), F.pad(x, (0, 4)))
    found = written(wide, part.to(on), [1, 1, 5])
    expected = F.pad(x, (0, 4))
    expected[1:, 1:, 5:] = part
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(wide.cpu(), F.pad(x, (0, 4))), "what it is written into has its old value"


# ---- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "accumulation", "expected"),
    [
        ((), 1, UNROLLED),
        ((), 3, UNROLLED),
        (("lora.dropout=0.1",), 2, FORWARD),
        (("lora.targets=[q_proj,v_proj]",), 1, {"q_proj": "columns", "v_proj": "both"}),
        (("lora.targets=[up_proj,down_proj]",), 2, {"up_proj": "columns", "down_proj": "rows"}),
        (("model.stack=scanned", "model.remat=save_dots"), 1, FOLDED),
        (("model.stack=scanned",), 3, FOLDED),
        (("model.stack=scanned", "lora.dropout=0.1"), 2, FORWARD),
    ],
    ids=str,
)
def test_steps_and_evaluations_are_those_of_plain_torch(
    make_config: Callable[..., Config],
    xla: Any,
    eager: EagerRuntime,
    words: tuple[str, ...],
    accumulation: int,
    expected: dict[str, str],
) -> None:
    """Evaluations between steps read the same weights without what steps wrote into them."""
    config = make_config(*WORDS, *words)
    dropout = config.lora.dropout
    runs = [Run(config, runtime) for runtime in (xla, eager)]
    assert [paddings(run.model.module) for run in runs] == [expected, {}]
    before = {part.path: part.matrix(part.weight.dtype).cpu().clone() for part in padded_parts(runs[0])}
    losses = [list(trained(run, accumulation=accumulation, dropout=dropout)) for run in runs]
    assert torch.tensor(losses[0]).sub(torch.tensor(losses[1])).abs().max() < 1e-5
    for part in padded_parts(runs[0]):
        assert torch.equal(part.matrix(part.weight.dtype).cpu(), before[part.path])
    trained_values = unstacked(runs[0].parameters)
    for name, value in runs[1].parameters.items():
        torch.testing.assert_close(trained_values[name].cpu(), value, atol=1e-4, rtol=0)


HEADS_OF_128 = ("+model.tiny_arch.head_dim=128", "model.tiny_arch.num_attention_heads=8")


@pytest.mark.parametrize(
    ("words", "stacks"),
    [
        (("model.remat=save_dots",), 3),
        pytest.param(("model.remat=save_dots", *HEADS_OF_128), 3, marks=pytest.mark.slow),
        (("model.remat=save_attention",), 0),  # queries, keys and values are computed again
    ],
    ids=str,
)
def test_attention_reads_saved_queries_keys_and_values_out_of_their_stacks(
    make_config: Callable[..., Config], xla: Any, eager: EagerRuntime, words: tuple[str, ...], stacks: int
) -> None:
    """The TPU's kernels, interpreted; heads of 128 features are read out of the stacks by the kernel itself."""
    config = make_config(*WORDS, "model.stack=scanned", "model.attention=flash", *words)
    runs = [Run(config, runtime) for runtime in (xla, eager)]
    install_attention_kernel(on_xla.XlaAttention(mesh=Mesh(), target="interpreted"))
    batches = [random_batch(number, rows=2, seq_len=128) for number in range(3)]
    ours = runs[0].losses(batches)
    install_attention_kernel(None)
    (graph,) = runs[0].model.module.model.layers.graphs.values()
    assert len(graph.by_number) == stacks
    (call,) = graph.backward.graph.find_nodes(op="call_function", target=BACKWARD)
    assert len(call.args[0]) == 7 + (stacks > 0), "the layer's number behind what attention saved"
    torch.testing.assert_close(ours, runs[1].losses(batches), atol=1e-5, rtol=0)


def padded_parts(run: Run) -> list[PaddedLora]:
    return list(padded_adapters(run.model.module).values())


def trained(run: Run, *, accumulation: int, dropout: float, steps: int = 8) -> Iterator[float]:
    """Losses of steps, and of evaluations between them."""

    def evaluated(batch: Any) -> Tensor:
        with torch.no_grad():
            return next_token_loss(run.model.module, run.parameters, batch)[0].sum()

    evaluate = run.runtime.program(evaluated, name="evaluate", held=lambda: run.parameters)
    for number in range(steps):
        (loss,) = run.losses([random_batch(number, accumulation=accumulation, rows=2, dropout=dropout)])
        yield loss
        if number % 3 == 1:
            run.model.module.eval()
            batch = {name: tensor[0] for name, tensor in random_batch(99).items() if tensor.ndim == 3}
            yield float(evaluate(run.runtime.put(batch, rows_dim=0)).cpu()) / 1000
            run.model.module.train()


def test_a_step_writes_the_adapters_into_the_device_s_weights(make_config: Callable[..., Config], xla: Any) -> None:
    """Otherwise every step would copy all weights."""
    run = Run(make_config(*WORDS), xla)
    run.losses([random_batch(0), random_batch(1)])
    names = {part.leaf: part for part in padded_parts(run) if ".0." in part.path}
    before = {name: tensor.cpu().clone() for name, tensor in run.parameters.items()}
    run.losses([random_batch(2)])
    up, down = names["up_proj"], names["down_proj"]
    b, a = before[f"{up.path}.lora_B"], before[f"{down.path}.lora_A"]
    assert b.abs().max() > 0
    assert torch.equal(up.weight.cpu()[:, 64 + 8 : 64 + 16], b), "after the columns of gate_proj"
    assert torch.equal(down.weight.cpu()[64 : 64 + 8], a * down.scale)


@pytest.mark.parametrize("stack", ["unrolled", "scanned"])
def test_a_pass_without_gradients_inside_a_step_is_that_outside(
    make_config: Callable[..., Config], xla: Any, stack: str
) -> None:
    run = Run(make_config(*WORDS, f"model.stack={stack}"), xla)
    run.losses([random_batch(0), random_batch(1)])
    batch = {name: tensor[0] for name, tensor in random_batch(9).items() if tensor.ndim == 3}

    def both(batch: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outside = next_token_loss(run.model.module, run.parameters, batch)[0].sum()
            with with_adapters(run.model.weights_with_adapters()):
                return outside, next_token_loss(run.model.module, run.parameters, batch)[0].sum()

    program = run.runtime.program(both, name="both", held=lambda: run.parameters)
    outside, inside = (loss.cpu() for loss in program(run.runtime.put(batch, rows_dim=0)))
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((None, "fsdp", None), FORWARD),
        ((None, None, "fsdp"), {"down_proj": "rows"}),
        ((None, "tensor", None), {}),
    ],
    ids=str,
)
def test_sharded_stacks_are_padded_along_the_other_dimension(
    make_config: Callable[..., Config],
    xla: Any,
    monkeypatch: pytest.MonkeyPatch,
    axes: tuple[str | None, ...],
    expected: dict[str, str],
) -> None:
    from tpu_experiments.runtime.xla.in_place import XlaInPlace

    sharded = XlaInPlace(Mesh(fsdp=4, tensor=2), lambda name, shape: axes)
    monkeypatch.setattr(xla, "folding", replace(xla.folding, in_place=sharded))
    module = built(make_config(*WORDS, "model.stack=scanned"), xla).module
    assert paddings(module) == expected
    assert all(part.is_gathered for part in padded_adapters(module).values())


def test_others_are_not_padded(make_config: Callable[..., Config], xla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_experiments.runtime.xla.in_place import XlaInPlace

    config = make_config(*WORDS)
    assert paddings(built(config, xla).module) == UNROLLED
    for words in (("lora.dora=true",), ("model.base=int8",), ("lora.r=20",), ("lora.r=24",)):
        assert "columns" not in paddings(built(make_config(*WORDS, *words), xla).module).values(), words
    folding = xla.folding
    sharded = XlaInPlace(Mesh(fsdp=4), lambda name, shape: (("fsdp",), None))
    for other in (replace(folding, in_place=sharded), replace(folding, in_place=None)):
        monkeypatch.setattr(xla, "folding", other)
        assert paddings(built(config, xla).module) == {}
    monkeypatch.setattr(xla, "folding", folding)
    monkeypatch.setattr(padded, "MIN_FEATURES", 65)
    assert paddings(built(config, xla).module) == {}
