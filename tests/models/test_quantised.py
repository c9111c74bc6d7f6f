"""Codes are bitsandbytes', products those of decoded weights, and a quantised base trains as a dense one."""

import pytest
import torch
import torch.nn.functional as F

from tests.tiers import only
from tests.training.tiny import ARCHITECTURES, Run, built, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.adapters.quantised import (
    ABSMAX,
    NESTED,
    OFFSET,
    SCALE,
    Format,
    format_of,
    frozen_product,
    quantised_shapes,
)
from tpu_experiments.models.huggingface import HuggingFaceModel, ShapesOfModel
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.dynamic_type import SIGNED
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = pytest.mark.xla  # torch_xla is imported by bitsandbytes' neighbours
FORMATS = {
    "int8": Format("int8"),
    "int8 activations": Format("int8", int8_activations=True),
    "nf4": Format("nf4"),
    "nf4, scales in float32": Format("nf4", double_quant=False),
}


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def overrides(model: str, *more: str) -> list[str]:
    return [f"model={model}", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", *more]


# ---- codes and scales ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes.functional")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 160), (512, 1024), (300, 64)], ids=str)
def test_nf4_codes_and_scales_are_those_of_bitsandbytes(bnb, shape, dtype):
    dense = weight(*shape, dtype=dtype)
    codes, state = bnb.quantize_4bit(dense, blocksize=64, quant_type="nf4")
    ours = Format("nf4", double_quant=False).quantise(dense)
    assert torch.equal(ours["weight"].flatten(), codes.flatten())
    assert torch.equal(ours[ABSMAX].flatten(), state.absmax.flatten())
    doubly = Format("nf4").quantise(dense)
    assert torch.equal(doubly["weight"], ours["weight"])
    offset = state.absmax.mean()
    # float64 takes bitsandbytes' own plain path, the nearest value. Its C++ for float32 on a CPU looks values up in a
    # table and gives a neighbour for one scale in a thousand.
    scales, nested = torch.ops.bitsandbytes.quantize_blockwise.default(
        (state.absmax - offset).double(), torch.tensor(SIGNED), 256
    )
    assert torch.equal(doubly[ABSMAX].flatten(), scales.flatten())
    assert torch.equal(doubly[NESTED], nested)
    assert doubly[OFFSET] == offset


def test_the_table_of_eight_bits_is_that_of_bitsandbytes(bnb):
    assert torch.equal(torch.tensor(SIGNED), bnb.create_dynamic_map())


@pytest.mark.parametrize("double", [False, True])
def test_nf4_decodes_as_bitsandbytes_does(bnb, double):
    """Input widths that divide by 64: for others its CPU code mixes up blocks (an error of half a step and more)."""
    dense = weight(512, 1024, dtype=torch.bfloat16)
    codes, state = bnb.quantize_4bit(dense, blocksize=64, quant_type="nf4", compress_statistics=double)
    parts = Format("nf4", double_quant=double).quantise(dense)
    if double:  # the same scales, see above
        parts[ABSMAX] = state.absmax.view_as(parts[ABSMAX])
    ours = Format("nf4", double_quant=double).decode(parts, dtype=torch.bfloat16)
    theirs = bnb.dequantize_4bit(codes, state)
    assert (ours != theirs).float().mean() < (1e-3 if double else 1e-12)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("double", [False, True])
def test_the_kernels_of_a_gpu_take_codes_and_scales_as_they_lie(bnb, double, dtype):
    """The same operators as on a GPU, by bitsandbytes' code for a CPU."""
    from tpu_experiments.runtime.kernels import on_cuda

    format = Format("nf4", double_quant=double)
    parts = format.quantise(weight(512, 1024, dtype=torch.bfloat16))
    codes, scales = parts["weight"], [parts[name] for name in (ABSMAX, NESTED, OFFSET) if name in parts]
    plain = format.decode(parts, dtype=dtype)
    step = torch.finfo(dtype).eps * plain.abs().max()
    decoded = on_cuda.nf4_weight(codes, scales, block=64, dtype=dtype)
    torch.testing.assert_close(decoded, plain, atol=float(step), rtol=0)
    x = torch.randn(2, 5, 1024, dtype=dtype, generator=torch.Generator().manual_seed(1))
    product = on_cuda.nf4_product(x, codes, scales, block=64)
    torch.testing.assert_close(product, F.linear(x, decoded))


def test_int8_codes_and_scales_are_those_of_bitsandbytes(bnb):
    dense = weight(96, 160, dtype=torch.float16)
    codes, absmax, _ = bnb.int8_vectorwise_quant(dense)
    ours = Format("int8").quantise(dense)
    assert torch.equal(ours["weight"], codes)
    assert torch.equal(ours[SCALE], absmax / 127)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zeros(format):
    decoded = format.decode(format.quantise(torch.zeros(4, 64)), dtype=torch.float32)
    assert torch.equal(decoded, torch.zeros(4, 64))


@pytest.mark.parametrize(("name", "largest"), [("int8", 0.5 / 127), ("nf4", 0.1525)])
def test_the_error_is_half_a_step_at_most(name, largest):
    """NF4's widest gap is 0.3039, between -1 and -0.696; double quantisation adds up to 2 % of a scale here."""
    dense = weight(96, 160)
    decoded = FORMATS[name].decode(FORMATS[name].quantise(dense), dtype=torch.float32)
    assert (decoded - dense).abs().max() <= (largest + 0.03 * (name == "nf4")) * dense.abs().max()


def test_widths_that_nf4_cannot_hold_are_refused(make_config):
    config = make_config(*overrides("mistral7b", "model.base=nf4", "model.tiny_arch.hidden_size=33"))
    source = ShapesOfModel(config.model, seed=0)
    with pytest.raises(ConfigError, match=r"model\.base=nf4; .*.* odd width; set model\.base=int8"):
        built_shapes(source, config)


def built_shapes(source, config):
    from tpu_experiments.models.sources.build import describe

    return describe(source, lora=config.lora)


@pytest.mark.parametrize("name", FORMATS)
def test_every_device_decodes_the_same(name):
    format = FORMATS[name]
    parts = format.quantise(weight(96, 160))
    if name == "nf4":
        parts[ABSMAX] = torch.arange(240, dtype=torch.uint8).roll(16).view_as(parts[ABSMAX])
    on_xla = format.decode({part: tensor.to("xla") for part, tensor in parts.items()}, dtype=torch.float32)
    torch.testing.assert_close(on_xla.cpu(), format.decode(parts, dtype=torch.float32), atol=0, rtol=1e-6)


# ---- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_and_its_gradient_are_those_of_the_decoded_weight(name, device):
    format, dense = FORMATS[name], weight(96, 128)
    x, grad = (torch.randn(2, 5, n, generator=torch.Generator().manual_seed(n)) for n in (128, 96))
    parts = {part: tensor.to(device) for part, tensor in format.quantise(dense).items()}
    given = x.to(device).requires_grad_()
    out = frozen_product(given, parts, format=format)
    (of_x,) = torch.autograd.grad(out, given, grad.to(device))
    decoded = format.decode(format.quantise(dense), dtype=torch.float32)
    rounding = 0.02 if format.int8_activations else 1e-5
    for ours, exact in ((out, F.linear(x, decoded)), (of_x, grad @ decoded)):
        assert (ours.detach().cpu() - exact).norm() <= rounding * exact.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_no_decoded_weight_is_saved_for_the_backward_pass(name):
    parts = FORMATS[name].quantise(weight(256, 512))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen_product(torch.randn(3, 512, requires_grad=True), parts, format=FORMATS[name])
    assert {t.data_ptr() for t in saved} <= {t.data_ptr() for t in parts.values()}


# ---- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", only(["int8"], ["int8", "nf4"]))
@pytest.mark.parametrize("model", only(["mistral7b"], ARCHITECTURES))
def test_losses_are_those_of_a_dense_base_with_the_decoded_weights(make_config, monkeypatch, model, base):
    """Three steps, in the runtime that compiles: folded layers over codes, against layers over what they decode to."""
    from tpu_experiments.runtime.xla.device import XlaRuntime

    batches = [random_batch(0, lr=1e-2), random_batch(1, lr=1e-2), random_batch(0, lr=1e-2)]
    config = make_config(*overrides(model, f"model.base={base}"))
    folded = Run(config, XlaRuntime(config.hw, sharding=config.sharding)).losses(batches)
    unrolled = make_config(*overrides(model, f"model.base={base}", "model.stack=unrolled"))
    eager = Run(unrolled, EagerRuntime(unrolled.hw))
    names = quantised_shapes(eager.model.module)
    assert len(names) == 7 * config.model.tiny_arch["num_hidden_layers"]

    format, plain = format_of(config.model), make_config(*overrides(model, "model.stack=unrolled"))
    read = HuggingFaceModel.weights

    def rounded(source, wanted):
        for item in read(source, wanted):
            if item.name in names:
                object.__setattr__(item, "tensor", format.decode(format.quantise(item.tensor), dtype=torch.float32))
            yield item

    monkeypatch.setattr(HuggingFaceModel, "weights", rounded)
    expected = Run(plain, EagerRuntime(plain.hw)).losses(batches)
    assert eager.losses(batches) == pytest.approx(expected, abs=1e-5)
    assert folded == pytest.approx(expected, abs=1e-5)
    assert expected[2] < expected[0]


def test_counts_are_those_of_the_weights_that_codes_stand_for(make_config):
    reports = []
    for base in ("dense", "int8", "nf4"):
        config = make_config(*overrides("mistral7b", f"model.base={base}"))
        reports.append(built(config, EagerRuntime(config.hw)).report)
    assert reports[0] == reports[1] == reports[2]


def test_a_model_for_inference_has_the_same_base(make_config):
    config = make_config(*overrides("qwen05b", "model.base=nf4", "hw.runtime=eager"))
    trained = built(config, EagerRuntime(config.hw))
    frozen = build_frozen(
        trained.source, lora=config.lora, trained=trained.trainable, place=EagerRuntime(config.hw).place
    )
    own, theirs = dict(frozen.named_parameters()), dict(trained.module.named_parameters())
    codes = [name for name in own if not name.endswith(("lora_A", "lora_B"))]
    assert any(name.endswith(ABSMAX) for name in codes)
    assert all(torch.equal(own[name], theirs[name]) for name in codes)


def test_what_no_format_holds_is_refused(make_config, refusal_of):
    assert "codes of int8 are not trained" in refusal_of("model.base=int8", "lora=none")
    assert "use model.base=int8" in refusal_of("model.base=nf4", "model.base_activations=int8")


@pytest.fixture
def refusal_of(make_config):
    from tpu_experiments.config.checks import check

    def refusal(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check(make_config(*words))
        return str(caught.value)

    return refusal
