"""Weights that adapters round: their start, their gradients, folded as in training, and read by compressed-tensors."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests.config.composing import composed
from tests.training.tiny import Run, configured, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.calibrated import GridForm, TrainedGrid
from tpu_experiments.export.quantised import write_quantised
from tpu_experiments.export.weights import Effect, whole_model
from tpu_experiments.models.adapters.low_rank_qat import (
    EXPONENT,
    RoundedLinear,
    decoded,
    fixed_point,
    fold,
    input_settings,
    rounded_product,
    rounded_tokens,
)
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.quantisation.grid import Grid, over_columns
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.stacked import LEARNT_SCALE, is_learnt_scale, unstacked
from tpu_experiments.tasks.export.readers import TransformersModel

pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("plain_attention"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
ROWS, COLUMNS, R = 48, 64, 4
TINY = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "model.linear=lr_qat")
GROUPS = "model.linear_group=32"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- the layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 16), (2, 0), (7, 0)])
def test_it_starts_as_the_weight_rounded_to_the_grid(bits: int, group: int) -> None:
    grid, weight = Grid(bits, group, EXPONENT), drawn(ROWS, COLUMNS) * 0.02
    phi, scales = fixed_point(weight, grid)
    assert (phi.dtype, scales.shape) == (torch.int8, (ROWS, COLUMNS // (group or COLUMNS)))
    own = weight / over_columns(scales, COLUMNS)
    assert torch.equal(phi.float(), (own.clamp(grid.lowest, grid.greatest) * 2 ** (8 - bits)).round())
    codes = fold(phi, drawn(R, COLUMNS), torch.zeros(ROWS, R), grid=grid, scale=3.0, dtype=torch.float32)
    assert (codes.min(), codes.max()) == (grid.lowest, grid.greatest)
    # Two roundings: a weight half-way between integers may go to either.
    differs = codes != grid.codes(weight, scales)
    assert bool((((own % 1) - 0.5).abs()[differs] <= 0.5 ** (8 - bits + 1) + 1e-6).all())
    found = {power: ((grid.decode(grid.codes(weight, s), s) - weight).abs() ** 4).mean() for power, s in (
        (4.0, scales), ("least squares", dataclasses.replace(grid, exponent=2.0).scales(weight)),
    )}  # fmt: skip
    assert found[4.0] <= found["least squares"]


def by_autograd(
    x: Tensor, phi: Tensor, a: Tensor, b: Tensor, scales: Tensor, *, grid: Grid, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition with torch's own operations: rounding by detach, clip by clamp."""
    latent = phi.float() / 2 ** (8 - grid.bits) + scale * (b @ a)
    rounded = latent + (latent.round() - latent).detach()
    clipped = rounded.clamp(grid.lowest, grid.greatest)
    return F.linear(x, clipped * over_columns(scales, phi.shape[1])), clipped


@pytest.mark.parametrize("group", [0, 16])
def test_outputs_and_gradients_are_those_of_the_definition(group: int) -> None:
    grid = Grid(4, group)
    phi, scales = fixed_point(drawn(ROWS, COLUMNS) * 0.02, grid)
    values = [drawn(3, 5, COLUMNS, seed=1), drawn(R, COLUMNS, seed=2), drawn(ROWS, R, seed=3), scales]
    upstream = drawn(3, 5, ROWS, seed=4)
    found = []
    by_shards: Any = partial(rounded_product, shards=3)
    for compute in (rounded_product, by_shards, by_autograd):
        x, a, b, s = (value.clone().requires_grad_() for value in values)
        result: Any = compute(x, phi, a, b, s, grid=grid, scale=1.5)
        out = result[0] if isinstance(result, tuple) else result
        found.append((out, *torch.autograd.grad((out * upstream).sum(), [x, a, b, s])))
        if isinstance(result, tuple):
            at_the_end = ((result[1] == grid.lowest) | (result[1] == grid.greatest)).float().mean()
            assert 0.05 < float(at_the_end) < 0.6, "the clip is at work"
    for ours, apart, expected in zip(*found, strict=True):
        torch.testing.assert_close(apart, ours, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
        assert float(expected.detach().abs().max()) > 0
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5 * float(expected.detach().abs().max()))


def test_nothing_of_the_shape_of_the_weight_is_kept_but_its_bytes() -> None:
    layer = RoundedLinear(
        nn.Linear(COLUMNS, ROWS).requires_grad_(False), r=R, scale=1.0, grid=Grid(4, 0), rounds_inputs=True, name="q"
    )
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(drawn(7, COLUMNS).requires_grad_())
    large = {(tuple(t.shape), t.dtype) for t in kept if t.numel() >= ROWS * COLUMNS}
    assert large == {((ROWS, COLUMNS), torch.int8)}


def test_tokens_are_rounded_as_compressed_tensors_does() -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = drawn(600, COLUMNS) * torch.tensor([1.0, 30.0, 0.01, 1.0, 1.0, 0.0]).repeat(100)[:, None]
    x[3], x[4] = x[3].abs(), -x[4].abs()
    how = QuantizationArgs(**input_settings(ModelConfig(name="x", linear="lr_qat", linear_activations="int8")))
    step, zero = compute_dynamic_scales_and_zp(x[None], how, nn.Identity())
    leaf = x.clone().requires_grad_()
    ours = rounded_tokens(leaf)
    theirs = fake_quantize(x[None], step, zero, how)[0]
    assert torch.equal(ours.detach(), theirs)
    assert not torch.equal(ours[:5], x[:5])
    assert torch.equal(torch.autograd.grad(ours.sum(), leaf)[0], torch.ones_like(x))


# ---- the model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Run:
    """A tiny model after three steps at a rate that moves integers, in groups, with inputs of 8 bits."""
    config = composed(*TINY, "hw.runtime=eager", GROUPS, "model.linear_activations=int8", "lora.alpha=64",
                      "optim.scale_lr_ratio=0.1", "optim.weight_decay=0.5")  # fmt: skip
    run = Run(config, EagerRuntime(config.hw), updates=configured(config))
    run.config, run.start = config, {name: value.clone() for name, value in run.parameters.items()}  # type: ignore[attr-defined]
    run.losses([random_batch(i, lr=3e-2) for i in range(3)])
    return run


def test_scales_have_a_rate_of_their_own_and_do_not_decay(trained: Run) -> None:
    start: dict[str, Tensor] = trained.start  # type: ignore[attr-defined]
    scales = {name for name in trained.parameters if is_learnt_scale(name)}
    assert len(scales) == len(trained.parameters) // 3 == 14
    for name, value in trained.parameters.items():
        moved = float((value - start[name]).abs().max())
        # Adam moves by at most the rate where gradients keep their sign; 0.5 of decay would be 1.5 % a step.
        assert 0 < moved < (1.05 * 3 * 3e-3 if name in scales else 3 * 3e-2 * 1.5), name
    first = min(scales)
    decaying = (start[first] * (1 - 3e-2 * 0.5) ** 3 - start[first]).abs().max()
    assert float(decaying) > 0


def test_folded_it_computes_the_bits_of_training(trained: Run) -> None:
    """As task=generate and task=evaluate of an export build it; and as the merged weights and the packed integers."""
    config: Any = trained.config  # type: ignore[attr-defined]
    source = HuggingFaceModel(config.model, seed=config.seed)
    frozen = build_frozen(source, lora=config.lora, trained=trained.parameters, place=trained.runtime.place)
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    with torch.no_grad():
        ours = logits_of(frozen.eval(), {}, rows)
        assert torch.equal(ours, logits_of(trained.model.module.eval(), trained.parameters, rows))
    assert not any("lora_A" in name or "lora_B" in name for name, _ in frozen.named_parameters())
    effect = Effect()
    whole = whole_model(source, lora=config.lora, trained=trained.parameters)
    assert len(whole.linears) == 14
    merged = dict(whole.tensors(effect=effect))
    assert effect.changed == 14
    grid = Grid(4, 32)
    scales = {name: trained.parameters[name.removesuffix("weight") + LEARNT_SCALE] for name in whole.linears}
    layout, form = TrainedGrid(grid, scales=scales), GridForm(grid, form="rtn", feedback=False)
    for name in whole.linears:
        part: Any = frozen.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(merged[name], decoded(part.weight, scales[name], dtype=torch.float32))
        parts = layout.encode(name, merged[name])
        assert torch.equal(parts[f"{name}_packed"], form.packed(part.weight, scales[name])["_packed"])
        wide = (part.out_features, part.in_features)
        facts = [{key: (t.shape, t.dtype) for key, t in kind.items()} for kind in (parts, layout.shapes(name, wide))]
        assert facts[0] == facts[1]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_transformers_computes_with_the_integers_and_rounds_their_inputs(trained: Run, tmp_path: Path) -> None:
    """As the lines of a card load the files, which decode at the first product and need no word on the inputs."""
    config: Any = trained.config  # type: ignore[attr-defined]
    source = HuggingFaceModel(config.model, seed=config.seed)
    whole = whole_model(source, lora=config.lora, trained=trained.parameters)
    scales = {name: trained.parameters[name.removesuffix("weight") + LEARNT_SCALE] for name in whole.linears}
    layout = TrainedGrid(Grid(4, 32), scales=scales, inputs=input_settings(config.model))
    tokenizer = load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)
    write_quantised(str(tmp_path), layout, model=whole, dtype=torch.float32, tokenizer=tokenizer)
    frozen = build_frozen(source, lora=config.lora, trained=trained.parameters, place=trained.runtime.place)
    ids = torch.arange(5, 45)[None]
    batch = {"ids": ids.int(), "positions": torch.arange(40).int()[None], "segments": torch.ones_like(ids).int()}
    with torch.no_grad():
        ours = logits_of(frozen.eval(), {}, batch)[0].log_softmax(-1)
        read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        theirs = read(ids).logits[0].log_softmax(-1)
        whole_inputs = CompressedTensorsConfig(dequantize=True)
        other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=whole_inputs)
        unrounded = other(ids).logits[0].log_softmax(-1)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert float((unrounded - ours).abs().max()) > 1e-3, "the inputs are rounded"
    compared = TransformersModel(str(tmp_path), dtype=torch.float32).log_probs(ids[0].tolist())
    torch.testing.assert_close(compared, ours, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"its layers round their inputs to 8 bits; .* task\.run="):
        _ = HuggingFaceModel(ModelConfig(name="x", path=str(tmp_path), dtype="float32"), seed=0).config


@pytest.mark.parametrize(
    "more",
    [
        ("model.stack=scanned",),
        pytest.param(("model.stack=unrolled", GROUPS), marks=pytest.mark.slow),
        pytest.param(("model.remat=none", "model.linear_activations=int8"), marks=pytest.mark.slow),
        pytest.param(("model.remat=save_dots", GROUPS, "model=mistral7b"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_on_xla_the_steps_are_those_of_plain_torch(make_config: Any, more: tuple[str, ...]) -> None:
    from tpu_experiments.runtime.xla.device import XlaRuntime

    found = []
    for kind in ("xla", "eager"):
        config = make_config(*TINY, *more, "model.size=tiny", f"hw.runtime={kind}", "lora.alpha=64")
        runtime: Any = EagerRuntime(config.hw) if kind == "eager" else XlaRuntime(config.hw, sharding=config.sharding)
        run = Run(config, runtime, updates=configured(config))
        losses = run.losses([random_batch(i, lr=1e-2, accumulation=1 + i % 2) for i in (0, 2)])
        found.append((losses, unstacked({name: value.cpu() for name, value in run.parameters.items()})))
    (ours, parameters), (expected, others) = found
    assert ours == pytest.approx(expected, abs=1e-5)
    for name, value in others.items():
        # An integer that falls to the other side would be a difference of its own.
        torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_rounded_is_refused(make_config: Any) -> None:
    def refused(*words: str) -> str:
        config = make_config(*words)
        with pytest.raises(ConfigError) as caught:
            describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
        return str(caught.value)

    assert "model.linear_group=24; model.layers.0.self_attn.q_proj has 64 input features" in refused(
        *TINY, "model.linear_group=24"
    )


def test_a_plan_needs_no_weights(make_config: Any) -> None:
    config = make_config(*TINY)
    module, report = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    assert report.adapters == 14
    weight = module.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert (weight.is_meta, weight.dtype) == (True, torch.int8)
    phi, scales = fixed_point(torch.empty(8, 64, device="meta"), Grid(4, 0))
    assert phi.is_meta
    assert scales.shape == (8, 1)
