"""RTN and GPTQ against plain implementations of their definitions, and the words of compressed-tensors."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from tests.quantisation.layers import correlated_layer
from tpu_experiments.export.calibrated import GridForm
from tpu_experiments.export.quantised import Int8Layout
from tpu_experiments.quantisation.grid import DAMPING, Grid, proxy_error, rounded, with_feedback
from tpu_experiments.quantisation.packing import packed_bytes, packed_words, unpacked_bytes, unpacked_words
from tpu_experiments.quantisation.parts import Integers, layout_of


def plain_gptq(weight, hessian, grid, scales):
    """Optimal brain quantisation in a fixed order: after each column the inverse of what is left is computed anew."""
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    damped = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    left, found = weight.double().clone(), torch.empty_like(weight).double()
    scales_NK = scales.repeat_interleave(grid.group, 1).double()
    for place, column in enumerate(order.tolist()):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        scale = scales_NK[:, column]
        found[:, column] = (left[:, column] / scale).round().clamp(grid.lowest, -grid.lowest - 1) * scale
        error = (left[:, column] - found[:, column]) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    return found.float()


@pytest.mark.parametrize("bits", [2, 4])
def test_feedback_is_that_of_the_definition(bits):
    weight, hessian = correlated_layer(96)
    grid = Grid(bits, 32)
    codes, scales = with_feedback(weight, hessian, grid)
    expected = plain_gptq(weight, hessian, grid, scales)
    found = grid.decode(codes, scales)
    assert (found - expected).abs().max() < 1e-4
    without = proxy_error(weight, grid.decode(*rounded(weight, grid)), hessian)
    assert proxy_error(weight, found, hessian) < 0.75 * without


def test_every_weight_has_its_nearest_code():
    weight, _ = correlated_layer(64)
    grid = Grid(4, 16)
    codes, scales = rounded(weight, grid)
    assert codes.dtype == torch.int8
    assert (codes.min(), codes.max()) == (-8, 7)
    values = scales.repeat_interleave(16, 1)[..., None] * torch.arange(-8.0, 8.0)
    error = (weight - grid.decode(codes, scales)).abs()
    assert (error - (weight[..., None] - values).abs().amin(-1)).abs().max() < 1e-6


def test_scales_have_the_least_error_of_those_tried():
    weight, _ = correlated_layer(64)
    grid = Grid(3, 64)
    full = weight.abs().amax(1, keepdim=True) / 3.5
    searched = grid.decode(*rounded(weight, grid))
    whole = grid.decode(grid.codes(weight, full), full)
    assert (searched - weight).square().mean() < 0.8 * (whole - weight).square().mean()


def test_a_column_whose_inputs_are_always_zero_moves_no_other():
    weight, hessian = correlated_layer(64)
    hessian[:, 5] = hessian[5] = 0
    codes = []
    for value in (0.01, 0.4):
        weight[:, 5] = value
        codes.append(with_feedback(weight, hessian, Grid(4, 64))[0])
    assert not torch.equal(codes[0][:, 5], codes[1][:, 5])
    assert torch.equal(codes[0][:, torch.arange(64) != 5], codes[1][:, torch.arange(64) != 5])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_those_of_compressed_tensors(bits):
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 40), generator=random, dtype=torch.int8)
    words = packed_words(codes, bits=bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpacked_words(words, bits=bits, columns=40), codes.int())


@pytest.mark.parametrize("bits", [1, 5, 8, 12, 16])
def test_packed_integers_come_back(bits):
    random = torch.Generator().manual_seed(bits)
    values = torch.randint(0, 2**bits, (7, 13), generator=random, dtype=torch.int32)
    packed = packed_bytes(values, bits=bits)
    assert len(packed) == -(-7 * 13 * bits // 8)
    assert torch.equal(unpacked_bytes(packed, bits=bits, shape=(7, 13)), values)


@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 32), (4, 96), (8, 16), (4, 0), (3, 0)])
def test_what_is_written_decodes_to_what_was_computed(bits, group):
    weight, _ = correlated_layer(96)
    form = GridForm(Grid(bits, group), form="rtn", feedback=False)
    parts, decoded = form.encode(weight, None, seed=0)
    layout = layout_of(form.config(["lm_head"]))
    assert layout == Integers(bits, group or None)
    assert torch.equal(layout.decode(parts), decoded)
    sizes = {f"w{end}": (tuple(t.shape), t.dtype) for end, t in parts.items()}
    assert sizes == {f"w{end}": size for end, size in layout.sizes((96, 96)).items()}
    assert sizes == {name: (tuple(t.shape), t.dtype) for name, t in form.shapes("w", (96, 96)).items()}


def test_a_row_may_have_one_scale():
    weight, _ = correlated_layer(64)
    made = Int8Layout()
    layout = layout_of(made.config(["lm_head"]))
    parts = {name.removeprefix("w"): tensor for name, tensor in made.encode("w", weight).items()}
    assert torch.equal(layout.decode(parts), made.format.decode(made.format.quantise(weight), dtype=torch.float32))


OTHERS = [
    {"symmetric": False},
    {"type": "float"},
    {"dynamic": True},
    {"strategy": "tensor"},
    {"num_bits": 16},
    {"group_size": 0},
    {"num_bits": "four"},
]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_other_settings_are_not_taken_for_these(change):
    settings = GridForm(Grid(4, 16), form="rtn", feedback=False).config([])
    settings["config_groups"]["group_0"]["weights"] |= change
    assert layout_of(settings) is None
    rounding = GridForm(Grid(4, 16), form="lr_qat", feedback=False, inputs={"num_bits": 8}).config([])
    assert layout_of(rounding) is None
    assert layout_of({"quant_method": "gptq", "bits": 4}) is None
