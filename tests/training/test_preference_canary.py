"""The canaries with losses of preferences: every seeded fault is found, and a sound run raises no alarm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.config.composing import composed
from tests.tiers import only
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.canary import (
    STOP_COSINE,
    STOP_RATIO,
    WARN_COSINE,
    WARN_RATIO,
    HostModel,
    canary_rows,
    compare,
    is_referred,
    step_on_devices,
    step_on_host,
    with_reference,
)
from tpu_experiments.training.forward_canary import (
    STOP,
    WARN,
    LossFindings,
    losses_on_device,
    losses_on_host,
    probe_rows,
    rows_with_reference,
)
from tpu_experiments.training.row_lengths import measure_rows
from tpu_experiments.training.trainer import Trainer

LOSSES: dict[str, tuple[str, ...]] = {
    "sigmoid": ("objective=dpo",),
    "beta": ("objective=dpo", "objective.beta=1"),
    "robust": ("objective=dpo", "objective.loss=robust", "objective.label_smoothing=0.1"),
    "hinge": ("objective=dpo", "objective.loss=hinge", "objective.beta=1"),
    "ipo": ("objective=ipo",),
    "sigmoid_norm": ("objective=dpo", "objective.loss=sigmoid_norm"),
    "simpo": ("objective=simpo",),
    "orpo": ("objective=orpo",),
    "rpo": ("objective=dpo", "objective.sft_weight=1"),
    "kto": ("objective=kto",),
}
WORDS = (
    *("model=qwen05b", "debug=smoke", "data=stories_pairs_ro", "curriculum=single"),
    *(f"~data.stories_pairs_ro.questions.{name}" for name in ("one_person", "several_persons")),
    *("lora=all_linear_r8", "lora.init=a_zero", "lora.dropout=0.1", "trainer.canary.when=always"),
    *("hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=4"),
)
"""The rows of four devices, in one process."""
WEIGHTS = ("mlp.down_proj.weight", "self_attn.o_proj.weight", "self_attn.q_proj.weight", "embed_tokens.weight")


def built(folder: Any, *words: str) -> Trainer:
    """A trainer in plain torch as it is before its first step."""
    config = measure_rows(composed(*WORDS, *words, f"output_dir={folder}"), is_lookup=False)
    parts: Any = {"inputs": make_inputs(config, resolve_stages(config)), "outputs": None, "watch": Stopwatch()}
    trainer = Trainer(config, EagerRuntime(config.hw), **parts)
    trainer.build()
    return trainer


@contextmanager
def exchanged(weights: list[Tensor]) -> Iterator[None]:
    """The halves of these weights in each other's place."""
    own = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.roll(weight.shape[0] // 2, dims=0)
    yield
    for weight, data in zip(weights, own, strict=True):
        weight.data = data


def weight_faults(trainer: Trainer) -> dict[str, Any]:
    """Shards of a weight exchanged in all layers, and in the last one."""
    named, found = dict(trainer.model.module.named_parameters()), {}
    for name in WEIGHTS:
        hits = [weight for each, weight in named.items() if each.endswith(name)]
        found |= {f"{name} of all layers": exchanged(hits), f"{name} of the last": exchanged(hits[-1:])}
    return found


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A method of `owner` that is made from its own."""
    own = getattr(owner, name)
    setattr(owner, name, make(own))
    yield
    setattr(owner, name, own)


def gradient_faults(trainer: Trainer) -> dict[str, Any]:
    """Those that an evaluation does not have: wrong sums over devices, and shards of adapters exchanged in the step."""
    step = trainer.step

    def half(own: Any) -> Any:
        return lambda tensors: tensors if len(tensors) == 1 else [*(t / 2 for t in tensors[:-1]), tensors[-1]]

    def exchange(part: str, dim: int) -> Any:
        def moved(name: str, tensor: Tensor) -> Tensor:
            return tensor.roll(tensor.shape[dim] // 2, dims=dim) if part in name and "down_proj" in name else tensor

        return lambda own: (
            lambda module, parameters, rows: own(
                module, {name: moved(name, tensor) for name, tensor in parameters.items()}, rows
            )
        )

    def missing(own: Any) -> Any:
        def losses(module: Any, parameters: Any, rows: Any) -> tuple[Tensor, Tensor]:
            sums, kept = own(module, parameters, rows)
            kept_rows = (torch.arange(len(sums)) > 0).float()
            return sums * kept_rows.view(-1, *[1] * (sums.ndim - 1)), kept

        return losses

    return {
        "half a sum": replaced(step, "sum_over_processes", half),
        "halves of A": replaced(step, "losses", exchange("lora_A", -1)),
        "halves of B": replaced(step, "losses", exchange("lora_B", -2)),
        "without the rows of a device": replaced(step, "losses", missing),
    }


@pytest.mark.parametrize("name", only(["kto"], LOSSES))
def test_seeded_faults_are_found_and_a_sound_run_raises_no_alarm(name, tmp_path):
    trainer = built(tmp_path, *LOSSES[name])
    host = HostModel(trainer)
    batch, rows = canary_rows(trainer)
    probe = probe_rows(trainer)
    if is_referred(trainer):
        batch, rows = with_reference(trainer, batch, rows, model=host)
        probe = rows_with_reference(host, probe)
    expected, (losses, _, rounded) = step_on_host(host, rows), losses_on_host(host, probe)

    def gradients() -> Any:
        return compare(step_on_devices(trainer, batch), expected)

    def forward() -> float:
        return LossFindings(losses_on_device(trainer, probe)[0], losses, rounded).ratio

    assert not gradients().exceeds(cosine=WARN_COSINE, ratio=WARN_RATIO)
    assert forward() < WARN
    warned = []
    for faults, is_of_weights in ((weight_faults(trainer), True), (gradient_faults(trainer), False)):
        for what, fault in faults.items():
            with fault:
                findings, ratio = gradients(), forward() if is_of_weights else None
            assert findings.exceeds(cosine=WARN_COSINE, ratio=WARN_RATIO), (what, findings)
            assert ratio is None or ratio > STOP, (what, ratio)
            warned += [] if findings.exceeds(cosine=STOP_COSINE, ratio=STOP_RATIO) else [what]
    assert warned == (["without the rows of a device"] if name == "orpo" else [])
    assert not gradients().exceeds(cosine=WARN_COSINE, ratio=WARN_RATIO)
