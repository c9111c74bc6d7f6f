"""Muon against torch.optim.Muon over 20 steps, what it takes, and its state."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.config.composing import composed
from tests.optim.test_own_optimizer import TINY
from tests.training.tiny import Run, configured, plain_updates, random_batch
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.adapters.lora import scale_of
from tpu_experiments.optim.facts import require_patterns
from tpu_experiments.optim.muon import Muon, is_hidden_matrix, orthogonal
from tpu_experiments.optim.updates import optimizer_of
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.work import analytic_memory
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.stacked import unstacked
from tpu_experiments.training.pack import PackedStep

NUM_STEPS, LR = 20, 3e-3
LAYER = "model.layers.3"
MATRICES = {
    f"{LAYER}.up_proj.weight": (40, 24),
    f"{LAYER}.down_proj.weight": (24, 40),
    f"{LAYER}.q_proj.lora_A": (4, 24),
    f"{LAYER}.q_proj.lora_B": (40, 4),
}
REST = {"model.embed_tokens.weight": (50, 24), "lm_head.weight": (50, 24), f"{LAYER}.norm.weight": (24,)}


def muon(**settings: Any) -> Muon:
    common = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_dtype": "float32", "adamw": []}
    moments = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return Muon(**{**common, **moments, "adjust_lr_fn": "match_rms_adamw", **settings})


def tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradients(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, Tensor]]:
    """Of sizes between 1e-4 and 10 from step to step."""
    scales = torch.logspace(-4, 1, NUM_STEPS).tolist()
    return [{n: scale * g for n, g in tensors(shapes, 1 + step).items()} for step, scale in enumerate(scales)]


def trained(optimizer: Muon, shapes: dict[str, tuple[int, ...]], *, weight_decay: float) -> list[dict[str, Tensor]]:
    current = tensors(shapes, 0)
    updates = plain_updates(current, optimizer=optimizer, weight_decay=weight_decay)
    state, history = updates.init(current), []
    for step, grads in enumerate(gradients(shapes)):
        current, state = updates.update(current, grads, state, lr=torch.tensor([LR * (1 - step / NUM_STEPS)]))
        history.append(current)
    return history


def theirs(shapes: dict[str, tuple[int, ...]], make: Any) -> list[dict[str, Tensor]]:
    leaves = {name: torch.nn.Parameter(p) for name, p in tensors(shapes, 0).items()}
    optimizer, history = make(list(leaves.values())), []
    for step, grads in enumerate(gradients(shapes)):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / NUM_STEPS)
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        optimizer.step()
        history.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
    return history


def farthest(mine: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> float:
    pairs = [(a[name], b[name]) for a, b in zip(mine, other, strict=True) for name in a]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_step_in_float32_is_torchs(
    monkeypatch: pytest.MonkeyPatch, adjust_lr_fn: str, nesterov: bool, weight_decay: float
) -> None:
    """torch.optim.Muon rounds to bfloat16 by this one method; without it, its products are float32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    settings = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    expected = theirs(MATRICES, lambda p: torch.optim.Muon(p, lr=LR, weight_decay=weight_decay, **settings))
    found = trained(muon(**settings), MATRICES, weight_decay=weight_decay)
    assert farthest(found, expected) < 1e-6
    assert min(float((expected[-1][n] - p).abs().max()) for n, p in tensors(MATRICES, 0).items()) > 1e-3


def test_in_bfloat16_it_is_as_near_to_torchs_as_bfloat16_is() -> None:
    expected = theirs(MATRICES, lambda p: torch.optim.Muon(p, lr=LR, weight_decay=0.0))
    found = trained(muon(ns_dtype="bfloat16", adjust_lr_fn="original"), MATRICES, weight_decay=0.0)
    exact = trained(muon(adjust_lr_fn="original"), MATRICES, weight_decay=0.0)
    assert farthest(found, expected) < farthest(exact, expected)


def test_what_is_no_matrix_of_a_layer_is_adamws() -> None:
    found = trained(muon(), {**MATRICES, **REST}, weight_decay=0.1)
    leaves = [torch.nn.Parameter(p) for p in tensors({**MATRICES, **REST}, 0).values()]
    del leaves[: len(MATRICES)]
    groups = [{"params": leaves[:2], "weight_decay": 0.1}, {"params": leaves[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step, grads in enumerate(gradients({**MATRICES, **REST})):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / NUM_STEPS)
        for leaf, name in zip(leaves, REST, strict=True):
            leaf.grad = grads[name]
        optimizer.step()
    for leaf, name in zip(leaves, REST, strict=True):
        torch.testing.assert_close(found[-1][name], leaf.detach(), atol=1e-6, rtol=1e-6)


NAMES = {
    "model.layers.0:32:1.mlp.up_proj.weight": ((32, 8, 4), True),
    "model.layers.0:32:1.mlp.experts.gate_up_proj": ((32, 6, 8, 4), True),
    "model.layers.2.mlp.experts.down_proj": ((6, 8, 4), True),
    "model.layers.2.mlp.experts.down_proj.lora_A": ((6, 8, 4), True),
    "model.layers.0:32:1.q_proj.lora_B": ((32, 8, 4), True),
    "lm_head.lora_A": ((8, 4), True),
    "model.layers.0:32:1.q_proj.lora_magnitude_vector": ((32, 8), False),
    "model.layers.0.q_proj.lora_weight_scale": ((8, 4), False),
    "model.layers.0:32:1.norm.weight": ((32, 8), False),
    "model.layers.0.conv1d.weight": ((8, 1, 4), False),
    "model.layers.0.mixer.A_log": ((8, 4), False),
    "model.embed_tokens.weight": ((8, 4), False),
    "transformer.wte.weight": ((8, 4), False),
    "score.weight": ((8, 4), False),
}


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_known_by_name(name: str) -> None:
    shape, expected = NAMES[name]
    parameter = torch.empty(shape)
    assert is_hidden_matrix(name, parameter) is expected
    assert muon(adamw=["*"]).takes(name, parameter) is False
    slots = muon().init({name: parameter})[name]
    assert list(slots) == (["momentum"] if expected else ["first", "second"])


def test_layers_experts_and_matrices_alone_are_equal() -> None:
    """A stack of three layers of two experts each is six matrices, and a batch is what they are one by one."""
    name = "model.layers.0:3:1.mlp.experts.down_proj"
    whole = tensors({name: (3, 2, 6, 4)}, 0)
    grads = tensors({name: (3, 2, 6, 4)}, 1)
    grads[name][1] *= 100
    moved, _ = muon().update(whole, grads, muon().init(whole), lr=torch.tensor([0.1]), decay={name: 0.1})
    apart, parts = unstacked(whole), unstacked(grads)
    alone, _ = muon().update(apart, parts, muon().init(apart), lr=torch.tensor([0.1]), decay=dict.fromkeys(apart, 0.1))
    for each, value in unstacked(moved).items():
        torch.testing.assert_close(value, alone[each], atol=1e-6, rtol=1e-5)


def test_singular_values_are_near_one_and_zero_stays() -> None:
    found = torch.linalg.svdvals(orthogonal(torch.randn(3, 20, 30), steps=5))
    assert 0.5 < float(found.min()) < float(found.max()) < 1.3
    zero = orthogonal(torch.zeros(2, 5, 3, dtype=torch.bfloat16), steps=5)
    assert torch.equal(zero, torch.zeros_like(zero))


def test_the_step_is_as_long_as_adamws() -> None:
    """0.2 in every shape, which is what lets `optim.lr` be that of AdamW (arXiv 2502.16982)."""
    shapes = {name: shape for name, shape in MATRICES.items()}
    start = tensors(shapes, 0)
    moved, _ = muon().update(
        start, tensors(shapes, 1), muon().init(start), lr=torch.tensor([1.0]), decay=dict.fromkeys(start, 0.0)
    )
    for name, p in start.items():
        assert float((moved[name] - p).square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)


# ---- of a config --------------------------------------------------------------------------------------------


def test_a_pattern_has_to_match_and_adamw_takes_what_it_matches() -> None:
    config = composed("optim=muon", "optim.adamw=['*.q_proj.lora_?']")
    made = optimizer_of(config)
    assert isinstance(made, Muon)
    assert [made.takes(name, torch.empty(shape)) for name, shape in MATRICES.items()] == [True, True, False, False]
    with pytest.raises(ConfigError, match=r"optim.adamw has '\*.router.weight', which matches none"):
        require_patterns("adamw", ["*.router.weight"], list(MATRICES))


def test_rates_decay_clipping_and_averages_reach_every_matrix() -> None:
    more = ("optim.weight_decay=0.5", "optim.b_lr_ratio=4", "optim.ema=0.9", "optim.ns_dtype=float32")
    config = composed("optim=muon", *more)
    names = [f"{LAYER}.q_proj.lora_A", f"{LAYER}.q_proj.lora_B"]
    parameters = {name: torch.eye(4) for name in names}
    updates = configured(config)(parameters)
    state = updates.init(parameters)
    moved, state = updates.update(parameters, {n: torch.zeros(4, 4) for n in names}, state, lr=torch.tensor([0.01]))
    torch.testing.assert_close(moved[names[0]], torch.eye(4) * (1 - 0.01 * 0.5))
    torch.testing.assert_close(moved[names[1]], torch.eye(4) * (1 - 0.04 * 0.5))
    assert list(state[names[0]]) == ["momentum", "average_lag"]


def test_planned_bytes_are_those_of_the_state() -> None:
    """4 bytes of a layer's matrix, 8 of the embedding, the norms and biases."""
    config = composed("model=qwen05b", "lora=none", "optim=muon")
    arch = config.model.arch
    memory = analytic_memory(arch, step=step_settings(config, resolve_stages(config)[0].geometry))
    embedding = arch["vocab_size"] * arch["hidden_size"]
    vectors = 24 * (2 * 896 + 896 + 2 * 128) + 896
    matrices = 494_032_768 - embedding - vectors
    assert memory.optimizer * 2**30 == pytest.approx(4 * matrices + 8 * (embedding + vectors), rel=1e-9)


@pytest.mark.parametrize(("lora", "times"), [("lora=all_linear_r8", 3.0), ("lora=none", 1.0)])
def test_it_learns_at_a_rate_near_adamws(lora: str, times: float) -> None:
    """Twenty steps on four batches: the loss falls at least half as far, with adapters at three times the rate."""
    losses = {}
    for optim in ("adamw", "muon"):
        config = composed(*TINY[:3], lora, f"optim={optim}", "hw=cpu", "hw.runtime=eager")
        run = Run(config, EagerRuntime(config.hw), updates=configured(config))
        rate = 2e-3 * (times if optim == "muon" else 1.0)
        losses[optim] = run.losses([random_batch(step % 4, lr=rate) for step in range(20)])
    assert losses["muon"][-1] < losses["muon"][0] - 0.5 * (losses["adamw"][0] - losses["adamw"][-1])
    assert all(math.isfinite(loss) for loss in losses["muon"])


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("optim", ["muon", "schedule_free_adamw"])
@pytest.mark.parametrize("stack", ["scanned", "unrolled"])
def test_xla_trains_as_plain_torch_does(optim: str, stack: str) -> None:
    from tpu_experiments.runtime.xla.device import XlaRuntime

    found = []
    for kind in ("eager", "xla"):
        words = (*TINY, f"optim={optim}", "hw=cpu", f"hw.runtime={kind}", "optim.b_lr_ratio=4", f"model.stack={stack}")
        config = composed(*words, *(["optim.ns_dtype=float32"] if optim == "muon" else []))
        runtime = EagerRuntime(config.hw) if kind == "eager" else XlaRuntime(config.hw, sharding=config.sharding)
        run = Run(config, runtime, updates=configured(config))
        found.append(run.losses([random_batch(i % 2, lr=1e-3) for i in range(6)]))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0][-1] < found[0][1] - 0.02


def test_points_with_three_optimizers_share_a_program() -> None:
    """Three adapters in one program, each with its own state and rate: each trains as alone."""
    words = ("optim=adamw",), ("optim=muon", "optim.ns_dtype=float32"), ("optim=schedule_free_adamw",)
    configs = [composed(*TINY, "hw=cpu", "hw.runtime=eager", *more) for more in words]
    alone = [Run(config, EagerRuntime(config.hw), updates=configured(config)) for config in configs]
    packed = [Run(config, EagerRuntime(config.hw), updates=configured(config)) for config in configs]
    common = Run(configs[0], EagerRuntime(configs[0].hw)).model.module.train()
    step = PackedStep(common, [run.step for run in packed])
    scales, none = torch.full((3,), scale_of(configs[0].lora)), torch.zeros(3, dtype=torch.int32)
    batches = [random_batch(number, rows=2, lr=rate) for number, rate in enumerate((1e-2, 2e-2, 3e-2))]
    found = step(
        [dict(run.parameters) for run in packed],
        [run.state for run in packed],
        batches,
        scales=scales,
        thresholds=none,
    )
    for run, batch, (parameters, state, output) in zip(alone, batches, found, strict=True):
        assert run.losses([batch]) == pytest.approx([float(output.loss)], abs=1e-5)
        for name, value in parameters.items():
            # The direction of a gradient near 0 may differ.
            is_other = (value - run.parameters[name]).abs() > 1e-3 * float(batch["lr"])
            assert float(is_other.float().mean()) < 0.05
            assert state[name].keys() == run.state[name].keys()
