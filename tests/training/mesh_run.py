"""Prints how far 20 steps on a mesh of virtual devices are from the same steps on one, in a process of its own.

    python -m tests.training.mesh_run [--beside] OVERRIDE...

With --beside, small weights too are padded to hold their adapters (adapters/padded.py), and at least one has to be.

One JSON object: the largest difference of a loss and of a trained parameter, the losses' own movement, and what lies
elsewhere than its rule says, after the steps.
"""

import json
import math
import os
import sys
from typing import Any

import torch

from tests.config.composing import composed
from tests.training.tiny import Run, configured, random_batch
from tpu_experiments.config.schema import Config
from tpu_experiments.data.teacher import IDS, LOGPS
from tpu_experiments.objectives.base import REFERENCE, objective_of
from tpu_experiments.runtime.stacked import unstacked
from tpu_experiments.training.step import computing_of

NUM_STEPS = 20


def main(*words: str) -> None:
    """Run both and compare."""
    overrides = [word for word in words if word != "--beside"]
    is_beside = len(overrides) < len(words)
    config = composed(*overrides, "model.size=tiny", "model.dtype=float32", "hw.parallel=spmd")
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(config.hw.num_devices)}
    from tpu_experiments.models.adapters import padded
    from tpu_experiments.models.sources import build
    from tpu_experiments.runtime.xla.device import XlaRuntime

    if is_beside:
        padded.MIN_FEATURES, build.PADDING, padded.PADDING = 1, 32, 32
    rows = config.hw.num_devices
    dropout = config.lora.dropout
    batches = [random_batch(i, accumulation=2, rows=rows, dropout=dropout) for i in range(NUM_STEPS)]
    if config.objective.reads_reference():  # a row's two documents are a pair
        batches = [{**batch, REFERENCE.name: torch.zeros(batch["ids"].shape)} for batch in batches]
    if config.objective.teacher_entries():
        batches = [{**batch, **predicted(batch, entries=config.objective.teacher_entries())} for batch in batches]
    if config.objective.reads_single:
        batches = [of_single_answers(batch) for batch in batches]
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    run = Run(config, runtime, updates=configured(config), **learnt(config, runtime))
    if is_beside and not padded.padded_adapters(run.model.module):
        raise RuntimeError("no weight is padded")
    losses = torch.tensor(run.losses(batches))
    misplaced = [*elsewhere(run.parameters, runtime=runtime), *elsewhere(states(run), runtime=runtime)]
    found = unstacked({name: value.cpu() for name, value in run.parameters.items()})
    plain, expected = on_one_device(config, batches)  # second: a backward pass in plain torch must not come first
    print(
        json.dumps(
            {
                "losses": float((losses - plain).abs().max()),
                "parameters": max(float((found[name] - value).abs().max()) for name, value in expected.items()),
                "moved": float(plain.max() - plain.min()),
                "misplaced": misplaced,
            }
        )
    )


def of_single_answers(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two good answers a row, each met by the other's prompt, which the reference holds for less likely."""
    reference = torch.where(batch["learn"] > 0, -8.3, -18.0)  # -8.4 is that of any token
    segments = torch.where(batch["segments"] == 2, 3, batch["segments"])
    return {**batch, "segments": segments, REFERENCE.name: reference}


def predicted(batch: dict[str, torch.Tensor], *, entries: int) -> dict[str, torch.Tensor]:
    """Predictions of a teacher for every token, as if the row's tokens behind it were the likeliest."""
    ids = torch.stack([batch["ids"].roll(-n, -1) + 7 * n for n in range(1, entries + 1)], -1)
    logps = (-0.7 * torch.arange(entries)).log_softmax(0) + math.log(0.9)
    return {IDS: ids, LOGPS: logps.expand(ids.shape).contiguous()}


def learnt(config: Config, runtime: Any) -> dict[str, Any]:
    """The loss of a step: that of all logits, or of pairs in chunks."""
    if not (config.objective.reads_pairs or config.objective.teacher_entries()):
        return {}
    objective = objective_of(config, computing_of(config, runtime))
    return {"row_loss": objective.row_loss, "count": objective.count}


def states(run: Run) -> dict[str, torch.Tensor]:
    """Slots of the optimizer by the names that the sharding table knows them by."""
    return {f"{name}/{slot}": tensor for name, slots in run.state.items() for slot, tensor in slots.items()}


def elsewhere(tensors: dict[str, torch.Tensor], *, runtime: Any) -> list[str]:
    """Tensors whose tiles, as torch_xla has them, are not those of the sharding table."""
    import torch_xla

    wrong = []
    for name, tensor in tensors.items():
        if tensor.numel() == 1:
            continue
        wanted = tiles(runtime.mesh_sizes.sharding_text(runtime.folding.axes(name, tuple(tensor.shape))))
        lies = tiles(torch_xla._XLAC._get_xla_sharding_spec(tensor))
        if lies != wanted:
            wrong.append(f"{name}: {lies} instead of {wanted}")
    return wrong


def tiles(text: str) -> str:
    """`[2,1,2]` of `{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}`; empty where the whole is on every device."""
    return text.partition("devices=")[2].partition("]")[0]


def on_one_device(config: Config, batches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Losses and parameters in plain torch."""
    from tpu_experiments.config.hardware import HwConfig
    from tpu_experiments.runtime.eager import EagerRuntime

    hw = HwConfig(name="cpu", device="cpu", runtime="eager", parallel="inline", num_devices=1)
    runtime = EagerRuntime(hw)
    run = Run(config, runtime, updates=configured(config), **learnt(config, runtime))
    return torch.tensor(run.losses(batches)), run.parameters


if __name__ == "__main__":
    main(*sys.argv[1:])
