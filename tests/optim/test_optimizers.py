"""AdamW, Adafactor and clipping against torch.optim over 20 steps."""

import pytest
import torch
from torch import Tensor

from tests.training.tiny import plain_updates
from tpu_experiments.optim.adafactor import Adafactor
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.base import Optimizer, clip, global_norm
from tpu_experiments.runtime.stacked import unstacked

NUM_STEPS = 20
LR = 3e-3
SHAPES = {"matrix": (24, 40), "tall": (64, 3), "stacked": (2, 5, 7), "vector": (33,)}


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients() -> list[dict[str, Tensor]]:
    """Gradients of very different sizes from step to step and from row to row."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-4, 1, NUM_STEPS)
    return [
        {
            name: scale
            * torch.randn(shape, generator=generator)
            * torch.rand(shape[:1], generator=generator).reshape(-1, *[1] * (len(shape) - 1))
            for name, shape in SHAPES.items()
        }
        for scale in scales.tolist()
    ]


def ours(optimizer: Optimizer, *, weight_decay: float) -> list[dict[str, Tensor]]:
    """The parameters after every step; the learning rate changes from step to step as an input."""
    current, updates = parameters(), plain_updates(parameters(), optimizer=optimizer, weight_decay=weight_decay)
    state = updates.init(current)
    history = []
    for step, grads in enumerate(gradients()):
        current, state = updates.update(current, grads, state, lr=torch.tensor([lr_of(step)]))
        history.append(current)
    assert state[""]["count"].tolist() == [NUM_STEPS]
    return history


def lr_of(step: int) -> float:
    return LR * (1 - step / NUM_STEPS)


def theirs(make, *, weight_decay: float) -> list[dict[str, Tensor]]:
    """torch.optim with decay on tensors of two or more dimensions only, as ours."""
    leaves = {name: torch.nn.Parameter(p) for name, p in parameters().items()}
    groups = [
        {"params": [p for p in leaves.values() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in leaves.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    history = []
    for step, grads in enumerate(gradients()):
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        for name, p in leaves.items():
            p.grad = grads[name]
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in leaves.items()})
    return history


def assert_same(mine: list[dict[str, Tensor]], reference: list[dict[str, Tensor]]) -> None:
    start = parameters()
    for step, (a, b) in enumerate(zip(mine, reference, strict=True)):
        for name in SHAPES:
            torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-6, msg=f"{name} after step {step}")
    assert all((reference[-1][name] - start[name]).abs().max() > 1e-3 for name in SHAPES)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(weight_decay):
    mine = ours(AdamW(beta1=0.9, beta2=0.95, eps=1e-8), weight_decay=weight_decay)
    reference = theirs(lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8), weight_decay=weight_decay)
    assert_same(mine, reference)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip_threshold", [1.0, 2.0])
def test_adafactor(weight_decay, clip_threshold):
    settings = {"beta2_decay": -0.8, "eps1": 1e-30, "eps2": 1e-3}
    mine = ours(Adafactor(clip_threshold=clip_threshold, **settings), weight_decay=weight_decay)
    reference = theirs(
        lambda groups: torch.optim.Adafactor(
            groups, lr=LR, beta2_decay=-0.8, eps=(1e-30, 1e-3), d=clip_threshold, foreach=False
        ),
        weight_decay=weight_decay,
    )
    assert_same(mine, reference)


def test_adafactor_keeps_one_row_and_one_column_of_a_matrix():
    state = Adafactor(beta2_decay=-0.8, eps1=1e-30, eps2=1e-3, clip_threshold=1.0).init(parameters())
    shapes = {name: {slot: tuple(t.shape) for slot, t in slots.items()} for name, slots in state.items()}
    assert shapes["matrix"] == {"row": (24, 1), "column": (1, 40)}
    assert shapes["stacked"] == {"row": (2, 5, 1), "column": (2, 1, 7)}
    assert shapes["vector"] == {"variance": (33,)}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_parameter_with_zero_gradients_does_not_move(name):
    """As A at the first step, where B is zero."""
    made = {
        "adamw": AdamW(beta1=0.9, beta2=0.95, eps=1e-8),
        "adafactor": Adafactor(beta2_decay=-0.8, eps1=1e-30, eps2=1e-3, clip_threshold=1.0),
    }[name]
    start = parameters()
    zeros = {key: torch.zeros_like(p) for key, p in start.items()}
    after, _ = made.update(start, zeros, made.init(start), lr=torch.tensor([LR]), decay=dict.fromkeys(start, 0.0))
    for key, p in start.items():
        assert torch.equal(after[key], p)


@pytest.mark.parametrize("limit", [1e-2, 1.0, 1e6])
def test_clip_is_that_of_torch(limit):
    grads = gradients()[-1]
    leaves = {name: torch.nn.Parameter(p) for name, p in parameters().items()}
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    reference = torch.nn.utils.clip_grad_norm_(leaves.values(), limit)
    norm = global_norm(grads)
    clipped = clip(grads, norm=norm, limit=limit)
    torch.testing.assert_close(norm, reference, atol=0, rtol=1e-6)
    for name, leaf in leaves.items():
        torch.testing.assert_close(clipped[name], leaf.grad, atol=0, rtol=1e-6)
    assert float(global_norm(clipped)) <= limit * (1 + 1e-6) or limit > float(norm)


def test_no_limit_does_not_clip():
    grads = gradients()[-1]
    assert clip(grads, norm=global_norm(grads), limit=None) is grads


@pytest.mark.parametrize("kind", [AdamW, Adafactor])
def test_a_stack_is_so_many_parameters(kind):
    """Matrices and vectors of three layers, stacked or one by one: the same update, decay and state."""
    settings = {
        AdamW: {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        Adafactor: {"beta2_decay": -0.8, "eps1": 1e-30, "eps2": 1e-3, "clip_threshold": 1.0},
    }
    optimizer = kind(**settings[kind])
    generator = torch.Generator().manual_seed(0)
    names = ["layers.0:3:1.up.weight", "layers.0:3:1.norm.weight"]
    whole = {names[0]: torch.randn(3, 6, 4, generator=generator), names[1]: torch.randn(3, 6, generator=generator)}
    apart = unstacked(whole)
    of_whole, of_apart = (plain_updates(p, optimizer=optimizer, weight_decay=0.1) for p in (whole, apart))
    whole_state, state = of_whole.init(whole), of_apart.init(apart)
    for _ in range(3):
        grads = {name: torch.randn(p.shape, generator=generator) for name, p in whole.items()}
        for name in grads:
            grads[name][1] *= 100  # a layer that is unlike the others
        whole, whole_state = of_whole.update(whole, grads, whole_state, lr=torch.tensor([0.1]))
        apart, state = of_apart.update(apart, unstacked(grads), state, lr=torch.tensor([0.1]))
    for name, value in unstacked(whole).items():
        torch.testing.assert_close(value, apart[name])
    slots = {f"{name}/{slot}": t for name, values in whole_state.items() for slot, t in values.items()}
    for key, value in unstacked(slots).items():
        name, _, slot = key.rpartition("/")
        torch.testing.assert_close(value, state[name][slot])
