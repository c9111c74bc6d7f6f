"""Both loops against a written-out one: carry, ys, consts, order, types, autograd inside, loops inside, one program."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.ops import LoopCall, python_loop

pytestmark = pytest.mark.xla
LOOPS = ("python", "xla")


@pytest.fixture(params=LOOPS)
def loop(request):
    """The loop, between tensors of the host."""
    if request.param == "python":
        return python_loop
    import torch_xla

    from tpu_experiments.runtime.xla.loop import xla_loop

    device = torch_xla.device()

    def on_device(call):
        sent = {name: tuple(t.to(device) for t in getattr(call, name)) for name in ("carry", "xs", "consts")}
        found = xla_loop(replace(call, **sent))
        return tuple(tuple(t.cpu() for t in group) for group in found)

    return on_device


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reverse", [False, True])
def test_carry_consts_and_order(loop, reverse):
    xs, start, weight = draw(5, 3), draw(3, seed=1), draw(3, 3, seed=2)

    def fn(carry, x, consts):
        new = torch.tanh(carry[0] @ consts[0] + x[0])
        return (new, carry[1] + 1), (new * 2, x[1])

    count, index = torch.zeros((), dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    (last, counted), ys = loop(LoopCall(fn, carry=(start, count), xs=(xs, index), consts=(weight,), reverse=reverse))
    expected = torch.zeros(5, 3)
    carry = start
    for i in reversed(range(5)) if reverse else range(5):
        carry = torch.tanh(carry @ weight + xs[i])
        expected[i] = carry * 2
    torch.testing.assert_close(last, carry)
    torch.testing.assert_close(ys[0], expected)
    assert torch.equal(ys[1], index)
    assert counted.item() == 5
    assert counted.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
def test_types_stay(loop, dtype):
    values = torch.tensor([[1, 0], [0, 0], [1, 1]]).to(dtype)
    seen = []

    def fn(carry, x, consts):
        seen.extend(t.dtype for t in (*carry, *x, *consts))
        return carry, (torch.where(x[0].bool(), x[0], consts[0]),)

    (same,), (ys,) = loop(LoopCall(fn, carry=(values,), xs=(values,), consts=(values[0],)))
    assert set(seen) == {dtype}
    assert torch.equal(same, values)
    assert torch.equal(ys, torch.where(values.bool(), values, values[0]))


def test_nothing_but_ys_and_nothing_but_carry(loop):
    xs = draw(4, 2)
    carry, (ys,) = loop(LoopCall(lambda carry, x, consts: ((), (x[0] * 2,)), carry=(), xs=(xs,)))
    assert carry == ()
    torch.testing.assert_close(ys, xs * 2)
    (total,), ys = loop(LoopCall(lambda carry, x, consts: ((carry[0] + x[0],), ()), carry=(torch.zeros(2),), xs=(xs,)))
    assert ys == ()
    torch.testing.assert_close(total, xs.sum(0))


def layer(hidden, weight):
    return torch.tanh(hidden @ weight) + hidden


def gradients_by_loops(loop):
    """A body for micro-batches: layers forward and back in two loops, autograd in the innermost body."""

    def forward(carry, x, consts):
        return (layer(carry[0], x[0]),), (carry[0],)

    def backward(carry, x, consts):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in x]
            grads = torch.autograd.grad(layer(leaves[1], leaves[0]), leaves, carry[0])
        return (grads[1],), (grads[0],)

    def micro_batch(carry, x, consts):
        (last,), (inputs,) = loop(LoopCall(forward, carry=(x[0],), xs=(consts[0],)))
        with torch.enable_grad():
            leaf = last.detach().requires_grad_()
            loss = F.cross_entropy(leaf, x[1].long(), reduction="sum")
            (grad,) = torch.autograd.grad(loss, leaf)
        _, (grads,) = loop(LoopCall(backward, carry=(grad,), xs=(consts[0], inputs), reverse=True))
        return (carry[0] + grads,), (loss.detach(),)

    return micro_batch


def nested(loop, *, rows, targets, weights):
    return loop(
        LoopCall(gradients_by_loops(loop), carry=(torch.zeros_like(weights),), xs=(rows, targets), consts=(weights,))
    )


def expected_of(rows, targets, weights):
    leaf = weights.clone().requires_grad_()
    hidden = rows
    for i in range(len(weights)):
        hidden = layer(hidden, leaf[i])
    losses = F.cross_entropy(hidden.flatten(0, 1), targets.flatten().long(), reduction="none").view_as(targets).sum(1)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def samples(seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 8, (3, 6), generator=generator, dtype=torch.int32)
    return draw(3, 6, 8, seed=seed), targets, draw(4, 8, 8, seed=seed + 1) * 0.3


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_and_autograd_inside_a_loop(kind):
    from tpu_experiments.runtime.xla.loop import xla_loop

    rows, targets, weights = samples(0)
    losses, grads = expected_of(rows, targets, weights)
    if kind == "xla":
        import torch_xla

        sent = [t.to(torch_xla.device()) for t in (rows, targets, weights)]
        (found_grads,), (found,) = nested(xla_loop, rows=sent[0], targets=sent[1], weights=sent[2])
    else:
        (found_grads,), (found,) = nested(python_loop, rows=rows, targets=targets, weights=weights)
    torch.testing.assert_close(found.cpu(), losses)
    torch.testing.assert_close(found_grads.cpu(), grads, atol=1e-6, rtol=1e-5)


def test_a_body_is_differentiated_in_the_calling_thread():
    """Autograd's own thread keeps gradients for a moment, and a sync within it has crashed the process."""
    import torch_xla

    from tpu_experiments.runtime.xla.loop import xla_loop

    threads = []

    def body(carry, x, consts):
        with torch.enable_grad():
            leaf = x[0].detach().requires_grad_()
            leaf.register_hook(lambda grad: threads.append(threading.get_ident()))
            (grad,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
        return carry, (grad,)

    rows = draw(3, 2)
    _, (found,) = xla_loop(LoopCall(body, carry=(), xs=(rows.to(torch_xla.device()),)))
    assert set(threads) == {threading.get_ident()}
    torch.testing.assert_close(found.cpu(), 2 * rows)


def test_a_nested_loop_is_one_program_and_is_compiled_once():
    import torch_xla
    import torch_xla.debug.metrics as met

    from tpu_experiments.runtime.xla.loop import xla_loop

    device, counts = torch_xla.device(), []
    for seed in range(4):
        rows, targets, weights = (t.to(device) for t in samples(seed))
        torch_xla.sync()
        before = (met.metric_data("CompileTime") or (0,))[0]
        (grads,), _ = nested(xla_loop, rows=rows, targets=targets, weights=weights)
        torch_xla.sync()
        counts.append(met.metric_data("CompileTime")[0] - before)
        torch.testing.assert_close(grads.cpu(), expected_of(*samples(seed))[1], atol=1e-6, rtol=1e-5)
        del grads
    assert counts[0] <= 1, "0 where another test compiled the same program"
    assert counts[1:] == [0, 0, 0]


def test_dropout_differs_between_iterations_and_not_between_equal_seeds():
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpu_experiments.runtime.xla.loop import xla_loop

    device = torch_xla.device()

    def masks(seed):
        xm.set_rng_state(seed, str(device))
        ones = torch.ones(3, 64, device=device)
        _, (dropped,) = xla_loop(LoopCall(lambda carry, x, consts: ((), (F.dropout(x[0], 0.5),)), carry=(), xs=(ones,)))
        return dropped.cpu()

    first = masks(7)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, masks(7))
    assert not torch.equal(first, masks(8))


@pytest.mark.parametrize(
    "xs", [(), (torch.zeros(0, 2),), (torch.zeros(2), torch.zeros(3))], ids=["none", "empty", "odd"]
)
def test_a_loop_over_nothing_is_refused(loop, xs):
    with pytest.raises(ValueError, match="leading dimension"):
        loop(LoopCall(lambda carry, x, consts: (carry, ()), carry=(), xs=xs))


def test_a_carry_of_another_type_is_refused():
    import torch_xla

    from tpu_experiments.runtime.xla.loop import xla_loop

    ones = torch.ones(2, 3, device=torch_xla.device())
    with pytest.raises(TypeError, match="keep its types"):
        xla_loop(LoopCall(lambda carry, x, consts: ((carry[0].double(),), ()), carry=(ones[0],), xs=(ones,)))


def test_stacks_need_not_be_filled_first():
    """Whatever is in them is written over, and torch_xla's scan makes nothing but stacks by torch.zeros."""
    import torch_xla

    from tpu_experiments.runtime.xla.loop import xla_loop

    made = []

    def unwritten(rows):
        def make(shape, dtype):
            made.append((rows, shape, dtype))
            return torch.full(shape, 7, dtype=dtype, device=torch_xla.device()) if shape[1] == rows else None

        return make

    xs = draw(3, 4, 2).to(torch_xla.device())

    def fn(carry, x, consts):
        return (carry[0] + x[0].sum(),), (x[0] * 2, F.dropout(x[0], 0.0).sum(0))

    start = torch.zeros((), device=torch_xla.device())
    _, ys = xla_loop(LoopCall(fn, carry=(start,), xs=(xs,), rows=4), unwritten=unwritten)
    torch.testing.assert_close(ys[0].cpu(), 2 * xs.cpu())
    torch.testing.assert_close(ys[1].cpu(), xs.cpu().sum(1))
    assert made == [(4, (3, 4, 2), torch.float32), (4, (3, 2), torch.float32)]


@pytest.mark.parametrize("num_shards", [1, 4])
def test_only_stacks_of_rows_are_left_unwritten_and_only_on_a_tpu(num_shards):
    from tpu_experiments.runtime.xla.in_place import stablehlo
    from tpu_experiments.runtime.xla.loop import uninitialised_for

    assert uninitialised_for("CPU", mesh=Mesh(fsdp=num_shards)) is None
    assert uninitialised_for("TPU", mesh=Mesh(fsdp=num_shards, tensor=2)) is None
    make = uninitialised_for("TPU", mesh=Mesh(fsdp=num_shards))(8)
    assert make((3,), torch.float32) is None
    assert make((3, 6), torch.float32) is None
    assert make((3, 8), torch.bool) is None
    assert make((3, 16, 2), torch.bfloat16).shape == (3, 16, 2)
    text = stablehlo((3, 16, 2), "bf16", num_shards=num_shards, along=1)
    assert f"@AllocateBuffer(){' {mhlo.sharding' if num_shards > 1 else ' :'}" in text
    assert ("devices=[1,4,1]<=[4]" in text) == (num_shards == 4)
    assert f"-> tensor<3x{16 // num_shards}x2xbf16>" in text
    assert f"-> tensor<{16 // num_shards}x3xbf16>" in stablehlo((16, 3), "bf16", num_shards=num_shards, along=0)
