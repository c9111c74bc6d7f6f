"""Ask for compiled programs as a run on a TPU does, on devices of the CPU; a child process of test_torchtpu.py.

    python -m tests.runtime.asked_programs PROGRAMS WORD...

builds the run of the words, and prints for each of its programs whether the folder PROGRAMS has it. The runtime's own
code lowers them for the TPU; what differs from a TPU is where arrays lie, and that jax names the chips by topology.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.config.composing import composed_as_typed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.targets import locate
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.runtime.processes.env import variables
from tpu_experiments.training.batches import RunInputs


class Asked(Exception):
    """Raised in the place of loading a program, or compiling it."""


def main(folder: str, *words: str) -> None:
    """Print which programs are there."""
    config = composed_as_typed(*words)
    os.environ.update(variables(config.hw))
    os.environ.update({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(config.hw.num_devices)})
    import jax

    from tpu_experiments.planning.compiler import _topology
    from tpu_experiments.runtime.tpu import planned
    from tpu_experiments.runtime.tpu.device import TorchTpuRuntime
    from tpu_experiments.tasks.plan import programs

    chips = _topology(config.hw.topology or "", num_chips=config.hw.num_devices).devices
    here = jax.devices("cpu")
    jax.devices = jax.local_devices = lambda *_, **__: here  # type: ignore[assignment]
    facts_of, read = planned.facts_of, planned.read

    def on_tpu(text: str, **facts: Any) -> planned.Facts:
        return facts_of(text, **{**facts, "devices": chips[: config.hw.num_devices]})

    def asked(folder: Path, facts: planned.Facts) -> bytes:
        raise Asked("missing" if read(folder, facts) is None else "planned")

    planned.facts_of, planned.read = on_tpu, asked  # type: ignore[assignment]
    runtime = TorchTpuRuntime(config.hw, sharding=config.sharding, on_recompile="error", compile_cache=folder)
    kind: Any = locate(config.trainer._target_, key="trainer")
    nothing: Any = None  # no program needs the tokenizer
    trainer = kind(
        config, runtime, inputs=RunInputs(nothing, {}, resolve_stages(config)), outputs=None, watch=Stopwatch()
    )
    trainer.build()

    def tell(name: str, program: Callable[[dict[str, Tensor]], Any], batch: dict[str, Tensor], rows_dim: int) -> None:
        zeros = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in batch.items()}
        try:
            program(runtime.put(zeros, rows_dim=rows_dim))
        except Asked as answer:
            print(f"{name}: {answer}")

    stages = trainer.inputs.stages
    step = programs.batch_like(programs.shape_of(stages[0], runtime=runtime), trainer=trainer)
    tell("train", trainer.step_program, step | programs.added_like(trainer), 1)
    with programs.evaluating(trainer.model.module):
        held_out = programs.evaluation_shape(stages, runtime=runtime)
        rows = programs.rows_like(held_out, names=trainer.evaluator.tensor_names)
        tell("evaluate", trainer.evaluator.program, rows, 0)
        tell("sample", trainer.prompted.sampler.program, programs.sample_like(trainer.prompted.sampler, rows=1), -1)


if __name__ == "__main__":
    main(*sys.argv[1:])
