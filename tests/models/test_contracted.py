"""Linear layers into heads, out of heads and with their adapter, against F.linear: values and all gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.models.adapters import layouts, lora
from tpu_experiments.models.adapters.layouts import OneGradient, OneProduct, layout_of
from tpu_experiments.models.adapters.linear import LoraLinear
from tpu_experiments.models.parts.contracted import (
    LinearOfHeads,
    contracted,
    forked,
    into_heads,
    out_of_heads,
    together,
)
from tpu_experiments.models.parts.float32_gradients import cast_weights
from tpu_experiments.models.sources import build
from tpu_experiments.runtime.kernels import on_xla  # noqa: F401  # registers the products of torch_xla's runs
from tpu_experiments.runtime.ops import apart

pytestmark = pytest.mark.xla
ROWS, TOKENS, FEATURES, HEADS, HEAD_DIM, RANK = 2, 6, 8, 3, 5, 2
WIDTH = HEADS * HEAD_DIM


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def outcome(
    function: Callable[..., Tensor], tensors: list[Tensor], device: torch.device, *, of: list[int]
) -> list[Tensor]:
    """What the function returns, flattened to features, and the gradients of the tensors numbered in `of`."""
    given = [tensor.to(device) for tensor in tensors]
    for number in of:
        given[number].requires_grad_()
    out = function(*given).flatten(2)
    wanted = random(*out.shape).bfloat16().float().to(device)  # so that a gradient of bf16 is exact
    grads = torch.autograd.grad((out.float() * wanted).sum(), [given[number] for number in of])
    return [tensor.detach().cpu() for tensor in (out, *grads)]


CASES: dict[str, tuple[list[Tensor], list[int], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "into heads": (
        [random(ROWS, TOKENS, FEATURES), random(WIDTH, FEATURES), random(WIDTH)],
        [0, 1, 2],
        lambda *tensors: into_heads(*tensors, heads=HEADS),
        F.linear,
    ),
    "out of heads": (
        [random(ROWS, TOKENS, HEADS, HEAD_DIM), random(FEATURES, WIDTH), random(FEATURES)],
        [0, 1, 2],
        out_of_heads,
        lambda x, weight, bias: F.linear(x.flatten(2), weight, bias),
    ),
    "with rows and tokens as they are": (
        [random(ROWS, TOKENS, FEATURES), random(WIDTH, FEATURES)],
        [0, 1],
        contracted,
        F.linear,
    ),
    "together": (
        [random(ROWS, TOKENS, FEATURES), random(ROWS, TOKENS, RANK), random(WIDTH, FEATURES), random(WIDTH, RANK)],
        [0, 1, 3],
        lambda x, low, weight, b: together(torch.cat([x, low], -1), weight, b),
        lambda x, low, weight, b: F.linear(x, weight) + F.linear(low, b),
    ),
    "together, one of three adapters": (
        [random(ROWS, TOKENS, FEATURES), random(ROWS, TOKENS, 3 * RANK), random(WIDTH, FEATURES), random(WIDTH, RANK)],
        [0, 1, 3],
        lambda x, low, weight, b: together(torch.cat([x, low], -1), weight, b, first=RANK),
        lambda x, low, weight, b: F.linear(x, weight) + F.linear(low[..., RANK : 2 * RANK], b),
    ),
    "forked": (
        [random(ROWS, TOKENS, FEATURES), random(WIDTH, FEATURES), random(RANK, FEATURES)],
        [0, 2],
        lambda *tensors: torch.cat(forked(*tensors), -1),
        lambda x, weight, a: torch.cat([F.linear(x, weight), F.linear(x, a)], -1),
    ),
}


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_linear_layer(case: str, device: str) -> None:
    tensors, of, ours, plain = CASES[case]
    for found, expected in zip(
        outcome(ours, tensors, torch.device(device), of=of),
        outcome(plain, tensors, torch.device("cpu"), of=of),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_in_bf16_gradients_of_weights_are_summed_in_float32(case: str) -> None:
    tensors, of, ours, plain = CASES[case]
    own = [3] if "together" in case else [number for number in of if number]
    rounded = [t if number in own else t.bfloat16() for number, t in enumerate(tensors)]
    if "together" in case:
        rounded[2] = rounded[2].bfloat16()
    given = outcome(ours, rounded, torch.device("cpu"), of=own)
    exact = outcome(plain, [t.float() for t in rounded], torch.device("cpu"), of=own)
    for ours, theirs in zip(given[1:], exact[1:], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", ["input_heads", "output_heads"])
def test_weights_that_are_trained_through_their_casts_have_float32_gradients(heads: str) -> None:
    width, others = (WIDTH, FEATURES) if heads == "input_heads" else (FEATURES, WIDTH)
    linear = nn.Linear(width, others)
    linear.weight.data, linear.bias.data = random(others, width).bfloat16().float(), random(others).bfloat16().float()
    layer = LinearOfHeads(linear, name="layers.0.attn.Wo", **{heads: HEADS})
    weights, x = dict(layer.named_parameters()), random(ROWS, TOKENS, width).bfloat16()
    wanted = random(ROWS, TOKENS, others).bfloat16()
    with cast_weights(weights, dtype=torch.bfloat16) as cast:
        out = torch.func.functional_call(layer, cast, (x,))
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(out, list(weights.values()), wanted)
    exact = torch.autograd.grad(F.linear(x.float(), linear.weight, linear.bias), list(weights.values()), wanted.float())
    for ours, theirs in zip(grads, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def adapted(*, features: int = FEATURES, outputs: int = WIDTH, device: str = "cpu") -> LoraLinear:
    linear = nn.Linear(features, outputs, device=device)
    return layout_of(linear)(linear.requires_grad_(False), r=RANK, scale=2.0, dropout=0.0, name="layers.0.mlp.up_proj")


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("way", "features", "outputs"), [("together", 8, 16), ("forked", 16, 8)])
def test_an_adapter_multiplied_with_its_weight_is_one_beside_it(
    way: str, features: int, outputs: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = adapted(features=features, outputs=outputs)
    layer.bias = layer.bias if has_bias else None
    layer.lora_A.data, layer.lora_B.data = random(RANK, features), random(outputs, RANK)
    layer = layer.to("xla")
    calls: list[int] = []
    joint = getattr(layouts, way)
    monkeypatch.setattr(layouts, way, lambda *args, **more: calls.append(1) or joint(*args, **more))
    found = []
    for tokens in (1, 10**9):
        monkeypatch.setattr(layouts, "TOGETHER_TOKENS", tokens)
        x = random(ROWS, TOKENS, features).to("xla").requires_grad_()
        out = layer(x)
        grads = torch.autograd.grad((out * random(*out.shape).to("xla")).sum(), [x, layer.lora_A, layer.lora_B])
        found.append([tensor.detach().cpu() for tensor in (out, *grads)])
    assert len(calls) == 1
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inputs", ["xx", "xy", "yx"])
def test_adapters_of_one_tensor_multiply_it_with_their_weights_from_one_copy(
    inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gate_proj and up_proj; where they read two tensors, each has a copy of its own."""
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj = adapted(features=8, outputs=16), adapted(features=8, outputs=20)
    for part in mlp.children():
        part.lora_A.data, part.lora_B.data = random(RANK, 8), random(part.out_features, RANK)
    lora._link_siblings(mlp)
    copies: list[Tensor] = []
    joined = layouts.together
    monkeypatch.setattr(layouts, "together", lambda x, *args, **more: copies.append(x) or joined(x, *args, **more))
    found = []
    for tokens in (1, 10**9):
        monkeypatch.setattr(layouts, "TOGETHER_TOKENS", tokens)
        mlp = mlp.to("xla")
        given = {name: random(ROWS, TOKENS, 8).roll(int(name == "y")).to("xla").requires_grad_() for name in inputs}
        outs = [part(given[name]) for part, name in zip(mlp.children(), inputs, strict=True)]
        loss = sum((out * random(*out.shape).to("xla")).sum() for out in outs)
        weights = [weight for name, weight in mlp.named_parameters() if "lora_" in name]
        grads = torch.autograd.grad(loss, [*given.values(), *weights])
        found.append([tensor.detach().cpu() for tensor in (*outs, *grads)])
    assert len(copies) == 2
    assert (copies[0] is copies[1]) == (inputs == "xx")
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "outputs", "tokens", "chips", "one"),
    [
        (896, 4864, 8192, 1, "output"),  # Qwen2.5 0.5B, gate_proj
        (4864, 896, 8192, 1, "gradient"),  # its down_proj
        (896, 896, 8192, 1, "none"),  # its q_proj
        (4096, 14336, 2048, 1, "none"),  # Mistral 7B, gate_proj: the weight's copy costs more than it saves
        (14336, 4096, 2048, 1, "none"),  # its down_proj
        (4096, 14336, 16384, 8, "none"),  # the same on eight chips, in one program
    ],
)
def test_they_are_one_product_where_tokens_and_features_are_many(
    features: int, outputs: int, tokens: int, chips: int, one: str
) -> None:
    layer = adapted(features=features, outputs=outputs, device="meta")
    x, on_host = torch.empty(1, tokens, features, device="meta"), torch.empty(1, tokens, features)
    if features == outputs:
        assert type(layer) is LoraLinear
        return
    assert isinstance(layer, OneProduct if outputs > features else OneGradient)
    layer.row_shards = chips
    assert layer.pays(x) == (one != "none")
    assert not layer.pays(on_host), "of a program that XLA does not compile"
    layer.dropout = 0.1
    assert layer.pays(x) == (one == "output"), "only A's input has dropout"
    assert layer.eval().pays(x) == (one != "none")


@pytest.mark.parametrize(
    ("leaf", "features", "outputs", "tokens", "chips", "is_apart"),
    [
        ("down_proj", 4864, 896, 4096, 1, True),  # Qwen2.5 0.5B
        ("down_proj", 4864, 896, 4096, 8, False),  # of eight chips, in one program
        ("down_proj", 14336, 4096, 4096, 1, False),  # Mistral 7B, which has no room for it
        ("up_proj", 896, 4864, 4096, 1, False),
    ],
)
def test_the_activation_is_read_behind_a_barrier_where_tokens_are_many(
    leaf: str, features: int, outputs: int, tokens: int, chips: int, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(features, outputs, device="meta").requires_grad_(False)
    layer = LoraLinear(linear, r=RANK, scale=2.0, dropout=0.0, name=f"layers.0.mlp.{leaf}")
    calls: list[int] = []
    monkeypatch.setattr(build, "apart", lambda x: calls.append(1) or apart(x))
    build.read_activations_apart(nn.ModuleList([layer]), row_shards=chips)
    assert layer(torch.empty(1, tokens, features, device="meta")).shape == (1, tokens, outputs)
    assert len(calls) == is_apart
