"""DoRA and LoftQ against PEFT's layers, and over every kind of base."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.training.tiny import Run, random_batch
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models.adapters.dora import DoraLinear, dora_of, row_norms
from tpu_experiments.models.adapters.lora import MAGNITUDE, A, B, adapter_weights, scale_of
from tpu_experiments.models.adapters.quantised import Format, QuantLinear
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.dropout import noise
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
R, ALPHA, OUT, IN = 4, 12.0, 96, 128
FORMATS = {"int8": Format("int8"), "nf4": Format("nf4"), "nf4, scales in float32": Format("nf4", double_quant=False)}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_of(kind: str) -> nn.Linear | Conv1D:
    """A Linear with a bias, or GPT-2's."""
    linear: Any = Conv1D(OUT, IN) if kind == "conv1d" else nn.Linear(IN, OUT)
    with torch.no_grad():
        linear.weight.copy_(drawn(*linear.weight.shape) / 8)
        linear.bias.copy_(drawn(OUT, seed=1))
    return linear.requires_grad_(False)


def with_values(layer: DoraLinear) -> DoraLinear:
    """A, B and lengths that are all at work."""
    with torch.no_grad():
        layer.lora_A.copy_(drawn(R, IN, seed=2))
        layer.lora_B.copy_(drawn(OUT, R, seed=3) / 8)
        layer.lora_magnitude_vector.copy_(1 + drawn(OUT, seed=4).abs())
    return layer


def adapted(linear: Any, *, dropout: float = 0.0) -> DoraLinear:
    name = "model.layers.0.self_attn.q_proj"
    return with_values(dora_of(linear)(linear, r=R, scale=ALPHA / R, dropout=dropout, name=name))


def of_peft(layer: DoraLinear, linear: Any, *, kind: str = "linear", dropout: Any = None) -> Any:
    """PEFT's layer over the same Linear with the same adapter."""
    from peft import LoraConfig as Settings
    from peft.tuners.lora.layer import Linear

    settings = Settings(r=R, lora_alpha=ALPHA, use_dora=True, fan_in_fan_out=kind == "conv1d")
    theirs: Any = Linear(linear, "default", settings, r=R, lora_alpha=ALPHA)
    copy_to_peft(layer, theirs)
    if dropout is not None:
        theirs.lora_dropout["default"] = dropout
    return theirs


def copy_to_peft(layer: DoraLinear, theirs: Any) -> None:
    with torch.no_grad():
        theirs.lora_A["default"].weight.copy_(layer.lora_A)
        theirs.lora_B["default"].weight.copy_(layer.lora_B)
        theirs.lora_magnitude_vector["default"].weight.copy_(layer.lora_magnitude_vector)


def agree_with_peft(layer: DoraLinear, theirs: Any, *, tolerance: float = 2e-6) -> None:
    """Outputs, and gradients of the input and of all three tensors."""
    x, upstream = drawn(3, 10, IN, seed=5), drawn(3, 10, OUT, seed=6)
    found = []
    for module, names in (
        (layer, ("lora_A", "lora_B", MAGNITUDE)),
        (theirs, tuple(f"{n}.default.weight" for n in ("lora_A", "lora_B", MAGNITUDE))),
    ):
        own = x.clone().requires_grad_()
        module.zero_grad()
        out = module(own)
        (out * upstream).sum().backward()
        found.append([out.detach(), own.grad, *(module.get_parameter(name).grad for name in names)])
    for ours, expected in zip(*found, strict=True):
        scale = float(expected.abs().max())
        assert scale > 0
        assert float((ours - expected).abs().max()) / scale < tolerance


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_layer_is_that_of_peft(kind: str) -> None:
    linear = linear_of(kind)
    layer = adapted(linear)
    agree_with_peft(layer, of_peft(layer, linear, kind=kind))


def test_dropout_is_that_of_peft() -> None:
    """W's own output keeps the whole input; what m changes of it does not."""

    class SameMask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer.dropped(x)

    linear = linear_of("linear")
    layer = adapted(linear, dropout=0.5)
    theirs = of_peft(layer, linear, dropout=SameMask())
    with noise(torch.tensor([1, 2, 3], dtype=torch.int32)):
        agree_with_peft(layer.train(), theirs.train())
        agree_with_peft(layer.eval(), of_peft(layer, linear).eval())


@pytest.mark.parametrize("form", FORMATS)
def test_over_codes_it_is_the_layer_over_the_weight_that_they_stand_for(form: str) -> None:
    linear = linear_of("linear")
    assert isinstance(linear, nn.Linear)
    format = FORMATS[form]
    parts = format.quantise(linear.weight)
    decoded = format.decode(parts, dtype=torch.float32)
    coded = QuantLinear(linear, format)
    for name, tensor in parts.items():
        coded._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    with torch.no_grad():
        linear.weight.copy_(decoded)
    agree_with_peft(adapted(coded), of_peft(adapted(linear), linear))


@pytest.mark.filterwarnings("ignore")
def test_over_nf4_it_is_that_of_peft_over_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from peft import LoraConfig as Settings
    from peft.tuners.lora.bnb import Linear4bit

    linear = linear_of("linear")
    assert isinstance(linear, nn.Linear)
    format = FORMATS["nf4, scales in float32"]
    coded = QuantLinear(linear, format)
    for name, tensor in format.quantise(linear.weight).items():
        coded._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    base = bnb.nn.Linear4bit(IN, OUT, quant_type="nf4", compress_statistics=False, compute_dtype=torch.float32)
    base.load_state_dict({"weight": linear.weight, "bias": linear.bias})
    theirs: Any = Linear4bit(
        base.to("cpu"), "default", Settings(r=R, lora_alpha=ALPHA, use_dora=True), r=R, lora_alpha=ALPHA
    )
    layer = adapted(coded)
    norms = row_norms(format.decode(format.quantise(linear.weight), dtype=torch.float32), layer.lora_A,
                      torch.zeros(OUT, R), scale=1.0)  # fmt: skip
    torch.testing.assert_close(norms, theirs.lora_magnitude_vector["default"].weight.detach(), atol=0, rtol=1e-6)
    copy_to_peft(layer, theirs)
    agree_with_peft(layer, theirs, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_sum_and_have_no_gradient(dtype: torch.dtype) -> None:
    weight, a, b = drawn(OUT, IN).to(dtype), drawn(R, IN, seed=1).requires_grad_(), drawn(OUT, R, seed=2) / 4
    whole = weight.double() + 1.5 * b.to(dtype).double() @ a.detach().to(dtype).double()
    norms = row_norms(weight, a, b.requires_grad_(), scale=1.5)
    assert norms.dtype == torch.float32
    assert not norms.requires_grad
    rtol = 1e-6 if dtype == torch.float32 else 2e-3  # W A^T is rounded to bf16
    torch.testing.assert_close(norms.double(), whole.norm(dim=1), atol=0, rtol=rtol)


def test_a_row_of_zeros_has_a_length_and_gradients_without_nan() -> None:
    layer = adapted(nn.Linear(IN, OUT, bias=False).requires_grad_(False))
    with torch.no_grad():
        layer.weight[0] = 0
        layer.lora_B[0] = 0
        norms = row_norms(layer.weight, layer.lora_A, layer.lora_B, scale=layer.scale)
        layer.lora_magnitude_vector.copy_(norms)
    layer(drawn(2, IN)).square().sum().backward()
    for parameter in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
        assert parameter is not None
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_the_backward_pass_keeps_nothing_in_float32_of_the_shape_of_a_weight() -> None:
    layer = adapted(linear_of("linear")).to(torch.bfloat16)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(drawn(1000, IN).bfloat16().requires_grad_())
    own = {id(parameter) for parameter in layer.parameters()}
    large = [t for t in kept if t.numel() >= OUT * IN and id(t) not in own and t.data_ptr() != layer.weight.data_ptr()]
    assert {(tuple(t.shape), t.dtype) for t in large} == {((1000, OUT), torch.bfloat16), ((1000, IN), torch.bfloat16)}


def frozen_and_trained(make_config: Any, *overrides: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the model as task=generate builds it, and of the one that was trained."""
    config = make_config("model=qwen05b", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager", *overrides)
    run = Run(config, EagerRuntime(config.hw))
    run.losses([random_batch(i, lr=1e-2) for i in range(2)])
    assert any(name.endswith(MAGNITUDE) for name in run.parameters) == config.lora.dora
    reduced = config.seed if config.lora.init == "pissa" else None
    frozen = build_frozen(
        HuggingFaceModel(config.model, seed=config.seed),
        lora=config.lora,
        trained=run.parameters,
        place=run.runtime.place,
        reduced_with_seed=reduced,
    )
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    with torch.no_grad():
        return logits_of(frozen.eval(), {}, rows), logits_of(run.model.module.eval(), run.parameters, rows)


@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.dora=true",),
        ("lora.dora=true", "lora.init=pissa"),
        ("lora.dora=true", "model.base=int8"),
        ("lora.dora=true", "model.base=nf4", "lora.init=loftq"),
        ("model.base=nf4", "lora.init=loftq"),
    ],
    ids=" ".join,
)
def test_frozen_it_computes_what_was_trained(make_config: Any, overrides: tuple[str, ...]) -> None:
    """With the lengths divided by the norms once."""
    frozen, trained = frozen_and_trained(make_config, "lora=all_linear_r8", *overrides)
    torch.testing.assert_close(frozen, trained, atol=1e-5, rtol=0)


# ---- LoftQ ----------------------------------------------------------------------------------------------------


def loftq(lora: LoraConfig, weight: torch.Tensor, format: Format) -> dict[str, torch.Tensor]:
    items = adapter_weights(Named("q_proj.weight", weight), lora=lora, seed=0, format=format)
    return {item.name.removeprefix("q_proj."): item.tensor for item in items}


@pytest.mark.parametrize("scaling", ["alpha_over_r", "alpha_over_sqrt_r"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loftq_is_the_best_approximation_of_what_the_codes_lose(scaling: str, dtype: torch.dtype) -> None:
    lora = LoraConfig(r=8, alpha=24.0, init="loftq", scaling=scaling)
    weight, format = drawn(OUT, IN).to(dtype), FORMATS["nf4"]
    made = loftq(lora, weight, format)
    plain = format.quantise(weight)
    assert all(torch.equal(made[name], tensor) for name, tensor in plain.items()), "the codes are those of W"
    lost = weight.double() - format.decode(plain, dtype=dtype).double()
    added = scale_of(lora) * made[B].double() @ made[A].double()
    values = torch.linalg.svdvals(lost)
    assert float((lost - added).norm()) == pytest.approx(float(values[8:].norm()), rel=1e-6)  # Eckart and Young
    assert (lost - added).norm() < 0.9 * lost.norm()
    torch.testing.assert_close(made[A].norm(dim=1), made[B].norm(dim=0), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_loftq_is_that_of_peft_at_a_scale_of_one() -> None:
    """The steps of PEFT's `_loftq_init_new`, which itself asks for a GPU."""
    bnb = pytest.importorskip("bitsandbytes")
    from peft.utils.loftq_utils import _low_rank_decomposition

    weight = drawn(OUT, IN)
    codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    theirs = _low_rank_decomposition(weight - bnb.functional.dequantize_4bit(codes, state), reduced_rank=8)
    made = loftq(LoraConfig(r=8, alpha=8.0, init="loftq"), weight, FORMATS["nf4, scales in float32"])
    torch.testing.assert_close(made[B] @ made[A], theirs["L"] @ theirs["R"], atol=1e-6, rtol=1e-4)


def test_a_weight_that_is_no_code_starts_with_a_product_of_zero() -> None:
    lora = LoraConfig(r=4, init="loftq")
    base = Named("lm_head.weight", drawn(OUT, IN))
    made = {item.name.removeprefix("lm_head."): item.tensor for item in adapter_weights(base, lora=lora, seed=0)}
    assert torch.equal(made["weight"], base.tensor)
    assert made[A].any()
    assert not made[B].any()


def test_a_model_starts_nearer_to_the_dense_one(make_config: Any) -> None:
    """By its logits; the export subtracts nothing, and an untrained adapter has no effect."""
    common = ("model=mistral7b", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager", "lora=all_linear_r32")
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    logits = {}
    for case in ((), ("model.base=nf4",), ("model.base=nf4", "lora.init=loftq")):
        config = make_config(*common, *case)
        run = Run(config, EagerRuntime(config.hw))
        with torch.no_grad():
            logits[case] = logits_of(run.model.module, run.parameters, rows)
    dense, codes, nearer = logits.values()
    assert (nearer - dense).norm() < 0.5 * (codes - dense).norm()
    assert run.model.initial.keys() == run.model.trainable.keys()
    assert run.model.taken_out == {}
