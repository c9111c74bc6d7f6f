"""VPTQ: what feedback and a second codebook are worth, what is written, and the gathering Linear on torch_xla."""

import math

import pytest
import torch

from tests.quantisation.layers import correlated_layer
from tpu_experiments.export.calibrated import VectorForm
from tpu_experiments.export.vector_model import VectorLinear
from tpu_experiments.quantisation.grid import proxy_error
from tpu_experiments.quantisation.parts import CodebookVectors, as_parts, from_parts, layout_of, vector_sizes
from tpu_experiments.quantisation.vectors import Vectors, codebook, column_order, encoded, nearest

KINDS = [Vectors(4, 16), Vectors(4, 16, residual=8), Vectors(4, 16, outliers=0.05, outlier_size=16)]


@pytest.fixture(scope="module")
def layer():
    return correlated_layer(96)


@pytest.mark.parametrize("how", KINDS, ids=["one", "residual", "outliers"])
def test_feedback_lowers_what_the_layers_outputs_lose(layer, how):
    weight, hessian = layer
    without = proxy_error(weight, encoded(weight, hessian.diag().diag(), how, seed=0).decode(), hessian)
    made = encoded(weight, hessian, how, seed=0)
    error = proxy_error(weight, made.decode(), hessian)
    assert error < 0.85 * without
    if how.residual:
        assert error < 0.6 * proxy_error(weight, encoded(weight, hessian, KINDS[0], seed=0).decode(), hessian)


@pytest.mark.slow
def test_errors_are_those_that_were_published():
    """896 x 896, v=4, k=256: 0.097, and with feedback 0.063 on another Hessian."""
    weight, hessian = correlated_layer(896)
    without = proxy_error(weight, encoded(weight, hessian.diag().diag(), Vectors(), seed=0).decode(), hessian)
    assert without == pytest.approx(0.0966, abs=0.001)
    assert proxy_error(weight, encoded(weight, hessian, Vectors(), seed=0).decode(), hessian) < 0.063


@pytest.mark.parametrize("how", KINDS, ids=["one", "residual", "outliers"])
def test_what_is_written_decodes_to_the_same(layer, how):
    made = encoded(*layer, how, seed=0)
    parts = as_parts(made, how)
    assert torch.equal(from_parts(parts, how).decode(), made.decode())
    assert layout_of(VectorForm(how).config([])) == CodebookVectors(how)
    sizes = {end: (tuple(tensor.shape), tensor.dtype) for end, tensor in parts.items()}
    assert sizes == vector_sizes(how, (96, 96))
    held = sum(tensor.nbytes for end, tensor in parts.items() if end != "_shape") * 8 / 96**2
    assert held == pytest.approx(VectorForm(how).bits((96, 96)), abs=1e-9)


def test_the_same_seed_gives_the_same_bytes(layer):
    one, other = (as_parts(encoded(*layer, KINDS[2], seed=3), KINDS[2]) for _ in range(2))
    assert all(torch.equal(one[end], other[end]) for end in one)


def test_centroids_are_weighted_means_and_none_is_empty():
    random = torch.Generator().manual_seed(0)
    points = torch.cat([torch.randn(200, 2, generator=random) * 0.01 + centre for centre in (0.0, 5.0, 9.0)])
    weights = torch.rand(600, generator=random) + 0.1
    book = codebook(points, weights, size=8, generator=random)
    chosen = nearest(points, book)
    assert chosen.unique().numel() == 8
    distances = (points[:, None] - book).norm(dim=-1)
    assert (distances.gather(1, chosen[:, None])[:, 0] - distances.amin(1)).abs().max() < 5e-3
    for index in range(8):
        own = chosen == index
        mean = (points[own] * weights[own, None]).sum(0) / weights[own].sum()
        assert (mean - book[index]).abs().max() < 0.02


def test_bits_count_codebooks():
    assert Vectors(4, 256).bits((896, 896)) == pytest.approx(2 + 256 * 4 * 16 / 896**2)
    assert Vectors(8, 4096, residual=256).bits((4096, 4096)) == pytest.approx(
        (12 + 8) / 8 + (4096 + 256) * 8 * 16 / 4096**2
    )


def test_columns_come_back_into_their_order():
    order = column_order(torch.tensor([1, 4]), 6)
    assert torch.tensor([0, 2, 3, 5, 1, 4])[order].tolist() == list(range(6))


@pytest.mark.xla
@pytest.mark.parametrize("how", KINDS[2:], ids=["outliers"])
def test_on_torch_xla_the_weight_is_gathered_in_one_program(layer, how):
    import torch_xla
    import torch_xla.debug.metrics as met

    made = encoded(*layer, how, seed=0)
    x = torch.randn(3, 96)
    expected = torch.nn.functional.linear(x, made.decode(), torch.ones(96))
    linear = VectorLinear(made, torch.nn.Parameter(torch.ones(96))).to(torch_xla.device())
    given = x.to(torch_xla.device())
    torch_xla.sync()
    met.clear_all()
    outputs = []
    for _ in range(2):
        outputs.append(linear(given))
        torch_xla.sync()
    assert (met.metric_data("CompileTime") or (0,))[0] == 1
    assert not [name for name in met.counter_names() if name.startswith("aten::")]
    torch.testing.assert_close(outputs[1].cpu(), expected, rtol=1e-5, atol=1e-5)
    assert math.isfinite(float(expected.sum()))
