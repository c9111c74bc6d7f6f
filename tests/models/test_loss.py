"""The chunked loss against the plain one: rows, gradients of hidden states and head, caps, z-loss, memory, models."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_experiments.models.passes import loss
from tpu_experiments.models.passes.forward import row_losses, target_weights
from tpu_experiments.models.passes.loss import Terms, chunked_row_losses
from tpu_experiments.runtime.ops import python_loop

pytestmark = pytest.mark.xla
B, T, H, V = 3, 20, 8, 80
# Every case in plain torch and few on XLA, where each is compiled for seconds.
CHUNKS = [("python", 1), ("python", 4), ("python", 7), ("python", 20), ("python", 64), ("xla", 7)]
TERMS = ({"soft_cap": 2.0}, {"z_loss": 0.1}, {"soft_cap": 2.0, "z_loss": 0.1})


@pytest.fixture(autouse=True)
def _few_first_entries(monkeypatch):
    monkeypatch.setattr(loss, "NUM_FIRST", 8)


def sample(*, dtype=torch.float32, length=T, rows=B):
    """Hidden states, a head, and rows of two packed documents and padding; a third of the tokens is not learnt."""
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, length, H), (V, H)))
    segments = torch.ones(rows, length, dtype=torch.int32)
    segments[:, length // 3 :] = 2
    segments[1, length // 2 :] = 0
    learn = (torch.rand(rows, length, generator=generator) < 0.67).int()
    ids = torch.randint(0, V, (rows, length), generator=generator, dtype=torch.int32)
    return hidden, head, {"ids": ids, "learn": learn, "segments": segments}


def plain(hidden, head, batch, *, soft_cap=None, z_loss=0.0):
    """The formulas, over all logits at once."""
    logits = (hidden @ head.T).float()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    sums, weights = row_losses(logits, batch)
    return sums + z_loss * (torch.logsumexp(logits, -1) ** 2 * target_weights(batch)[1]).sum(1), weights


def with_gradients(function, hidden, head, batch, *, trained, device="cpu"):
    """Sums, weights and gradients on the host; every row's sum has its own factor."""
    hidden, head = hidden.to(device).detach().requires_grad_(), head.to(device).detach().requires_grad_(trained)
    sums, weights = function(hidden, head, {name: t.to(device) for name, t in batch.items()})
    factors = torch.tensor([1.0, -0.3, 0.01], device=device)
    grads = torch.autograd.grad((sums * factors).sum(), [hidden, head] if trained else [hidden])
    return [t.detach().cpu() for t in (sums, weights, *grads)]


def chunked(loop, chunk, **terms):
    return lambda *args: chunked_row_losses(*args, Terms(chunk, loop, **terms))


def assert_same(found, expected, *, tolerance=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["python", "xla"])
def place(request):
    """A loop and its device."""
    if request.param == "python":
        return python_loop, "cpu"
    import torch_xla

    from tpu_experiments.runtime.xla.loop import xla_loop

    return xla_loop, torch_xla.device()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("place", "chunk"), CHUNKS, indirect=["place"])
def test_rows_and_gradients_are_those_of_all_logits(place, chunk, trained):
    loop, device = place
    found = with_gradients(chunked(loop, chunk), *sample(), trained=trained, device=device)
    assert_same(found, with_gradients(plain, *sample(), trained=trained))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_soft_cap_and_z_loss_are_the_written_out_ones(terms, trained):
    found = with_gradients(chunked(python_loop, 7, **terms), *sample(), trained=trained)
    expected = with_gradients(lambda *args: plain(*args, **terms), *sample(), trained=trained)
    assert_same(found, expected)
    without = with_gradients(plain, *sample(), trained=trained)
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(expected[::2], without[::2], strict=True)), "they matter"


@pytest.mark.parametrize("terms", [{}, {"soft_cap": 2.0, "z_loss": 0.1}], ids=str)
def test_rows_of_a_head_have_the_gradient_of_a_trained_head(place, terms):
    """Targets are among them, and one is of no row."""
    loop, device = place
    rows_N = torch.tensor([7, 30, 2, 79])
    found = with_gradients(chunked(loop, 7, rows_N=rows_N.to(device), **terms), *sample(), trained=True, device=device)
    *expected, grad_VH = with_gradients(lambda *args: plain(*args, **terms), *sample(), trained=True)
    alone = torch.zeros_like(grad_VH).index_copy(0, rows_N, grad_VH[rows_N])
    assert_same(found, [*expected, alone])


def test_evaluation_has_the_same_sums_and_no_gradient(place):
    loop, device = place
    hidden, head, batch = sample()
    batch = {name: t.to(device) for name, t in batch.items()}
    with torch.no_grad():
        leaf = hidden.to(device).requires_grad_()
        sums, _ = chunked(loop, 7)(leaf, head.to(device), batch)
    assert not sums.requires_grad
    torch.testing.assert_close(sums.cpu(), plain(*sample())[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_bf16_is_as_close_to_float32_as_the_plain_path(place, trained):
    loop, device = place
    inputs = sample(dtype=torch.bfloat16)
    exact = with_gradients(plain, inputs[0].float(), inputs[1].float(), inputs[2], trained=trained)
    theirs = with_gradients(plain, *inputs, trained=trained)
    ours = with_gradients(chunked(loop, 7), *inputs, trained=trained, device=device)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    for close, far, true in zip(ours, theirs, exact, strict=True):
        error, allowed = ((t.float() - true).abs().max() for t in (close, far))
        assert error <= 1.5 * allowed + 1e-3 * true.abs().max()


def test_the_head_alone_may_be_trained():
    hidden, head, batch = sample()
    leaf, own = head.clone().requires_grad_(), head.clone().requires_grad_()
    (grad,) = torch.autograd.grad(chunked(python_loop, 7)(hidden, leaf, batch)[0].sum(), leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(plain(hidden, own, batch)[0].sum(), own)[0])


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 33), chunk=st.integers(1, 40), trained=st.booleans())
def test_any_length_goes_with_any_chunk(length, chunk, trained):
    widths = set()

    def watched(call):
        widths.add((len(call.xs[0]), call.xs[0].shape[2]))
        return python_loop(call)

    given = sample(length=length)
    found = with_gradients(chunked(watched, chunk), *given, trained=trained)
    assert_same(found, with_gradients(plain, *given, trained=trained))
    ((num, size),) = widths
    assert size <= chunk
    learnt = max(1, int(target_weights(given[2])[1].sum(1).max()))  # no column of positions that no row learns
    assert learnt <= num * size < learnt + num


def lowered(function, *, trained):
    """HLO of loss and gradients on the XLA device."""
    import torch_xla

    hidden, head, batch = sample()
    device = torch_xla.device()
    hidden, head = hidden.to(device).requires_grad_(), head.to(device).requires_grad_(trained)
    sums, _ = function(hidden, head, {name: t.to(device) for name, t in batch.items()})
    grads = torch.autograd.grad(sums.sum(), [hidden, head] if trained else [hidden])
    return torch_xla._XLAC._get_xla_tensors_hlo([sums.detach(), *grads])


def largest(hlo):
    """Numbers in the largest array of a program as text."""
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]+)\]", hlo))


@pytest.mark.parametrize("trained", [False, True])
def test_no_array_of_a_program_holds_all_logits(trained):
    from tpu_experiments.runtime.xla.loop import xla_loop

    all_logits = B * T * V
    assert largest(lowered(plain, trained=trained)) == all_logits
    hlo = lowered(chunked(xla_loop, 4), trained=trained)
    assert largest(hlo) == max(B * 4 * V, B * T * H)


def test_a_frozen_head_costs_two_products_with_the_vocabulary_one_with_its_beginning_and_no_transfer():
    import torch_xla.debug.metrics as met

    from tpu_experiments.runtime.xla.loop import xla_loop

    met.clear_counters()
    hlo = lowered(chunked(xla_loop, 4), trained=False)
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    assert hlo.count(" dot(") == 3
    assert lowered(chunked(xla_loop, 4), trained=True).count(" dot(") == 5


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("above", [20.0, 60.0])
def test_a_target_far_below_the_best_entry_is_exact(above, trained):
    hidden, head, batch = sample()
    head[50] = head[50] * 0.01 + above * hidden[0, 3] / hidden[0, 3].norm() ** 2
    found = with_gradients(chunked(python_loop, 7), hidden, head, batch, trained=trained)
    assert_same(found, with_gradients(plain, hidden, head, batch, trained=trained))


@pytest.mark.parametrize("trained", [False, True])
def test_a_logit_out_of_reach_counts_as_75_above_and_all_stays_finite(trained):
    hidden, head, batch = sample()
    batch["segments"][:], batch["learn"][:] = 1, 0
    batch["learn"][0, 4] = 1
    batch["ids"][0, 4] = 30
    head[50] = 500 * hidden[0, 3] / hidden[0, 3].norm() ** 2
    sums, _, grad_hidden, *_ = with_gradients(chunked(python_loop, 7), hidden, head, batch, trained=trained)
    assert 75 <= sums[0] < 80
    slope = (grad_hidden[0, 3] * hidden[0, 3]).sum()  # along the logit that is too high
    assert 0 < slope < 1000
    assert torch.isfinite(grad_hidden).all()


def test_a_position_that_is_nearly_learnt_keeps_its_small_gradient_in_bf16():
    hidden, head, batch = sample(dtype=torch.bfloat16)
    hidden = head[batch["ids"].roll(-1, 1).long()] * 2  # targets' logits lead by some nats
    exact = with_gradients(plain, hidden.float(), head.float(), batch, trained=False)[2]
    ours, theirs = (
        with_gradients(function, hidden, head, batch, trained=False)[2].float()
        for function in (chunked(python_loop, 7), plain)
    )
    small = exact.norm(dim=-1) < 0.05
    assert small.sum() > 5
    errors = [((grad - exact)[small].norm() / exact[small].norm()).item() for grad in (ours, theirs)]
    assert errors[0] < 0.02
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.slow
def test_rows_and_head_split_over_devices_give_the_same():
    command = [sys.executable, "-m", "tests.models.sharded_loss"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    hidden, head, batch = sample(rows=4)
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    sums, _ = plain(*leaves, batch, soft_cap=3.0)
    norms = [float(grad.norm()) for grad in torch.autograd.grad(sums.sum(), leaves)]
    frozen, trained = json.loads(done.stdout.splitlines()[-1])
    assert frozen == {"sums": pytest.approx(sums.tolist(), rel=1e-5), "norms": pytest.approx(norms[:1], rel=1e-5)}
    assert trained == {"sums": pytest.approx(sums.tolist(), rel=1e-5), "norms": pytest.approx(norms, rel=1e-5)}
