"""The TPU's compiler sums every gradient over chips in float32, in the program of a model that computes in bf16."""

from collections import Counter
from pathlib import Path

import pytest

from tests.training.runs import run
from tpu_experiments.planning.hlo.text import Computation, Module, Shape, read_module

SETTINGS = (
    "task=plan",
    "task.programs=train",
    "hw=v6e8",
    "model=mistral7b",
    "model.size=tiny",
    "data=[sample_text]",
    "name=x",
    "trainer.seq_len=256",
    "trainer.micro_batch_rows=1",
)
SUMS = {"all-reduce", "all-reduce-start", "reduce-scatter"}
FOLDED = ("model.stack=scanned", "sharding=fsdp", "trainer.global_batch_rows=8")
ACCUMULATED = ("model.stack=scanned", "sharding=replicated", "trainer.global_batch_rows=16")
UNROLLED = ("model.stack=unrolled", "sharding=replicated", "model.remat=save_dots", "trainer.global_batch_rows=16")


LORA = 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
"""Elements of the adapters of one layer: r of 8; q and o, k and v, gate and up and down."""
OF_HEADS = 8 * (64 + 2 * 32 + 64)
"""Those of them whose products make or take heads: B of q, k and v, and A of o."""
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
"""Elements of the projections of one layer."""
NORMS = 2 * 64
"""Elements of its norms."""


def planned(folder: Path, *settings: str) -> Module:
    """Return the compiled program of a step with these settings."""
    done = run(*SETTINGS, *settings, output_dir=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (optimized,) = (folder / "plans" / "compiled").glob("*/optimized.hlo")
    return read_module(optimized.read_text())


def sums_over_chips(program: Module) -> Counter[Shape]:
    """Arrays that the program sums, by shape; one inside of a loop counts once. Losses and norms are left out."""
    return sum((sums_in(computation) for computation in program.computations.values()), Counter())


def sums_in(computation: Computation) -> Counter[Shape]:
    """Arrays that a computation sums over chips, by shape, without losses and norms."""
    summed = (computation.operand_shapes(line) for line in computation.instructions if line.opcode in SUMS)
    return Counter(shape for shapes in summed for shape in shapes if shape.num_elements >= 64)


@pytest.mark.parametrize(
    ("settings", "elements"),
    [
        # Behind the loop, of both layers: every chip has the adapters whole. The projections', and those of heads, are
        # summed in the loop.
        ((*FOLDED, "lora=all_linear_r8"), 2 * LORA - OF_HEADS),
        pytest.param((*UNROLLED, "lora=all_linear_r8"), 2 * LORA, marks=pytest.mark.slow),
        # Head and last norm beside the layers; rows of the embedding are exchanged before they are summed.
        pytest.param((*FOLDED, "lora=none"), LAYER + 2 * NORMS + 4096 * 64 + 64, marks=pytest.mark.slow),
    ],
    ids=["folded fsdp", "unrolled accumulated", "folded fsdp all weights"],
)
def test_every_gradient_is_summed_over_chips_in_float32(tmp_path, settings, elements):
    found = sums_over_chips(planned(tmp_path, *settings))
    assert {shape.dtype for shape in found} == {"f32"}, found
    assert sum(shape.num_elements * times for shape, times in found.items()) == elements, found


def test_gradients_of_folded_layers_are_summed_over_chips_once_a_step(tmp_path):
    """Behind the loop over layers, and behind that over micro-batches, but for those of heads."""
    program = planned(tmp_path, *ACCUMULATED, "lora=all_linear_r8", "lora.alpha=24")
    found = sums_in(program.entry)
    assert sum(shape.num_elements * times for shape, times in found.items()) == 2 * (LORA - OF_HEADS), found
    in_loops = sums_over_chips(program) - found
    assert sum(shape.num_elements * times for shape, times in in_loops.items()) == OF_HEADS, in_loops
