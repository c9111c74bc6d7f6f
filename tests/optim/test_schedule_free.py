"""Schedule-free AdamW against the package `schedulefree` over 20 steps, and what a config may say beside it."""

import re
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor

from tests.config.composing import composed
from tests.training.tiny import configured, plain_updates
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import OptimConfig
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.ema import LAG, Averages
from tpu_experiments.optim.facts import facts_of
from tpu_experiments.optim.schedule_free import ScheduleFreeAdamW
from tpu_experiments.optim.updates import Updates, updates_of
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.work import analytic_memory

NUM_STEPS, LR, WARMUP = 20, 3e-3, 5
SHAPES = {"layers.0.q.lora_A": (4, 24), "layers.0.q.lora_B": (40, 4), "norm.weight": (33,)}
FREE = ("model=tiny", "optim=schedule_free_adamw")


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients() -> list[dict[str, Tensor]]:
    scales = torch.logspace(-4, 1, NUM_STEPS).tolist()
    return [{n: scale * g for n, g in tensors(1 + step).items()} for step, scale in enumerate(scales)]


def rate(step: int) -> float:
    """The package's own warm-up."""
    return LR * min(1.0, (step + 1) / WARMUP)


def ours(*, ratio: float = 1.0, beta1: float = 0.9, **decay: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Trained parameters and averages after every step."""
    current = tensors(0)
    settings = OptimConfig(b_lr_ratio=ratio)
    optimizer = ScheduleFreeAdamW(beta1=beta1, beta2=0.999, eps=1e-8)
    updates = Updates(optimizer, facts_of(settings, current), decay.get("weight_decay"))
    state, history = updates.init(current), []
    if "of_stage" in decay:
        state[""]["weight_decay"] = torch.tensor([decay["of_stage"]])
    for step, grads in enumerate(gradients()):
        current, state = updates.update(current, grads, state, lr=torch.tensor([rate(step)]))
        history.append((current, dict(Averages(current, state))))
    return history


def theirs(
    *, weight_decay: float, ratio: float = 1.0, beta1: float = 0.9
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    leaves = {name: torch.nn.Parameter(p) for name, p in tensors(0).items()}
    groups = [
        {
            "params": [leaf],
            "lr": LR * (ratio if "lora_B" in name else 1.0),
            "weight_decay": weight_decay if leaf.ndim > 1 else 0.0,
        }
        for name, leaf in leaves.items()
    ]
    optimizer = AdamWScheduleFree(groups, lr=LR, betas=(beta1, 0.999), warmup_steps=WARMUP)
    optimizer.train()
    history = []
    for grads in gradients():
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        optimizer.step()
        trained = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        optimizer.eval()
        history.append((trained, {name: leaf.detach().clone() for name, leaf in leaves.items()}))
        optimizer.train()
    return history


def assert_equal(found: Any, expected: Any) -> None:
    for step, (mine, other) in enumerate(zip(found, expected, strict=True)):
        for part, what in enumerate(("trained", "average")):
            for name in SHAPES:
                a, b = mine[part][name], other[part][name]
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6, msg=f"{what} {name} after step {step}")


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"weight_decay": 0.0}, {"weight_decay": 0.0}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
        ({"of_stage": 0.1}, {"weight_decay": 0.1}),
        ({"weight_decay": 0.1, "ratio": 4.0}, {"weight_decay": 0.1, "ratio": 4.0}),
        ({"weight_decay": 0.1, "beta1": 0.98}, {"weight_decay": 0.1, "beta1": 0.98}),
    ],
    ids=["plain", "decay", "a stage's decay", "B faster than A", "beta1"],
)
def test_every_step_and_average_is_the_packages(mine: dict[str, float], other: dict[str, float]) -> None:
    found, expected = ours(**mine), theirs(**other)
    assert_equal(found, expected)
    trained, average = expected[-1]
    assert all(float((trained[name] - average[name]).abs().max()) > 1e-4 for name in SHAPES)


def test_without_a_step_nothing_moves_and_zeros_are_equal_points() -> None:
    start = tensors(0)
    updates = plain_updates(start, optimizer=ScheduleFreeAdamW(beta1=0.9, beta2=0.999, eps=1e-8))
    state = updates.init(start)
    assert all(torch.equal(average, start[name]) for name, average in Averages(start, state).items())
    moved, state = updates.update(start, tensors(1), state, lr=torch.tensor([0.0]))
    assert all(torch.equal(moved[name], start[name]) for name in start)
    assert all(bool(torch.isfinite(t).all()) for slots in state.values() for t in slots.values())


def test_the_state_is_eight_bytes_a_parameter() -> None:
    start = tensors(0)
    state = configured(composed(*FREE))(start).init(start)
    assert {name: list(slots) for name, slots in state.items() if name} == {key: ["second", LAG] for key in SHAPES}
    config = composed("model=qwen05b", "lora=none", "optim=schedule_free_adamw")
    step = step_settings(config, resolve_stages(config)[0].geometry)
    memory = analytic_memory(config.model.arch, step=step)
    assert memory.optimizer * 2**30 == pytest.approx(8 * 494_032_768, rel=1e-6)


# ---- of a config --------------------------------------------------------------------------------------------


def test_its_schedule_is_constant_unless_another_is_named() -> None:
    assert composed(*FREE).schedule.name == "constant"
    assert composed("model=tiny").schedule.name == "cosine"


REFUSED = {
    "schedule=cosine": "schedule=cosine with optim=schedule_free_adamw, whose average is in the place of a decay",
    "curriculum.stages.text.schedule.name=wsd": "curriculum.stages.text.schedule.name=wsd with optim=schedule_free",
    "optim.ema=0.9": "optim.ema=0.9 with optim=schedule_free_adamw, which averages its steps itself",
    "optim.beta1=0": "optim.beta1=0.0; it must be above 0.",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_contradicts_it_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        composed(*FREE, words)


def test_another_class_is_averaged_by_no_accident() -> None:
    made = ScheduleFreeAdamW(beta1=0.9, beta2=0.999, eps=1e-8)
    with pytest.raises(ConfigError, match="the run's optimizer is ScheduleFreeAdamW; one of them averages"):
        updates_of(composed("model=tiny"), tensors(0), optimizer=made)
    with pytest.raises(ConfigError, match="the run's optimizer is AdamW; one of them averages"):
        updates_of(composed(*FREE), tensors(0), optimizer=AdamW(beta1=0.9, beta2=0.95, eps=1e-8))
    assert not updates_of(composed("model=tiny"), tensors(0)).is_schedule_free
