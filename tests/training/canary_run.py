"""Prints what the layout canary finds on virtual devices, in a process of its own: as placed, and with shards swapped.

    python -m tests.training.canary_run OVERRIDE...

One JSON object: findings by case. `shards` has the halves of one placed weight swapped in every layer, `layer` in the
last layer alone.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import torch

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.runtime.stacked import is_stack
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.canary import (
    Findings,
    HostModel,
    Report,
    canary_rows,
    compare,
    step_on_devices,
    step_on_host,
)

WEIGHT = "mlp.down_proj.weight"


def main(*overrides: str) -> None:
    """Run the program on the devices three times and the reference once."""
    with tempfile.TemporaryDirectory() as folder:
        config = composed("debug=smoke", *overrides, "hw.parallel=spmd", f"output_dir={folder}")
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(config.hw.num_devices)}
        from tpu_experiments.runtime.xla.device import XlaRuntime
        from tpu_experiments.training.trainer import Trainer

        runtime = XlaRuntime(config.hw, sharding=config.sharding)
        inputs = make_inputs(config, resolve_stages(config))
        parts = Trainer(config, runtime, inputs=inputs, outputs=None, watch=Stopwatch())  # type: ignore[arg-type]
        parts.build()
        batch, rows = canary_rows(parts)
        before = {name: tensor.cpu().clone() for name, tensor in parts.parameters.items()}
        found: dict[str, Report] = {"right": step_on_devices(parts, batch)}
        for case, layers in (("shards", slice(None)), ("layer", slice(-1, None))):
            put(parts, swapped(placed(parts), layers))
            found[case] = step_on_devices(parts, batch)
            put(parts, swapped(placed(parts), layers))
        restored = all(torch.equal(parts.parameters[name].cpu(), tensor) for name, tensor in before.items())
        expected = step_on_host(HostModel(parts), rows)
        findings: dict[str, Findings] = {case: compare(each, expected) for case, each in found.items()}
        shown: dict[str, Any] = {case: asdict(each) | {"smallest": each.smallest} for case, each in findings.items()}
        print(json.dumps(shown | {"restored": restored}))


def placed(parts: Any) -> tuple[str, torch.Tensor]:
    """Name and host copy of the weight, a stack over layers."""
    name, weight = next(each for each in parts.model.module.named_parameters() if is_it(each[0]))
    return name, weight.detach().cpu()


def is_it(name: str) -> bool:
    """Whether a parameter is a stack of the weight."""
    return name.endswith(WEIGHT) and is_stack(name)


def swapped(named: tuple[str, torch.Tensor], layers: slice) -> tuple[str, torch.Tensor]:
    """The two halves of its output features in each other's place."""
    name, weight = named
    weight = weight.clone()
    weight[layers] = weight[layers].roll(weight.shape[-2] // 2, dims=-2)
    return name, weight


def put(parts: Any, named: tuple[str, torch.Tensor]) -> None:
    """The weight where the module has it."""
    name, weight = named
    owner, _, leaf = name.rpartition(".")
    value = torch.nn.Parameter(parts.runtime.place(weight, name=name), requires_grad=False)
    parts.model.module.get_submodule(owner)._parameters[leaf] = value


if __name__ == "__main__":
    main(*sys.argv[1:])
