"""The TPU's compiler sums every gradient over chips in float32, in the program of a model that computes in bf16."""

from collections import Counter
from pathlib import Path

import pytest

from tests.training.runs import run
from tpu_experiments.planning.hlo.text import Shape, read_module

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
UNROLLED = ("model.stack=unrolled", "sharding=replicated", "model.remat=save_dots", "trainer.global_batch_rows=16")


LORA = 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
"""Elements of the adapters of one layer: r of 8; q and o, k and v, gate and up and down."""
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
"""Elements of the projections of one layer."""
NORMS = 2 * 64
"""Elements of its norms."""


def sums_over_chips(optimized: Path) -> Counter[Shape]:
    """Arrays that the program sums, by shape; one inside of a loop counts once. Losses and norms are left out."""
    computations = read_module(optimized.read_text()).computations.values()
    summed = (each.operand_shapes(line) for each in computations for line in each.instructions if line.opcode in SUMS)
    return Counter(shape for shapes in summed for shape in shapes if shape.num_elements >= 64)


@pytest.mark.parametrize(
    ("settings", "elements"),
    [
        # Behind the loop, of both layers: every chip has the adapters whole. The projections' are summed in the loop.
        ((*FOLDED, "lora=all_linear_r8"), 2 * LORA),
        pytest.param((*UNROLLED, "lora=all_linear_r8"), 2 * LORA, marks=pytest.mark.slow),
        # Head and last norm beside the layers; rows of the embedding are exchanged before they are summed.
        pytest.param((*FOLDED, "lora=none"), LAYER + 2 * NORMS + 4096 * 64 + 64, marks=pytest.mark.slow),
    ],
    ids=["folded fsdp", "unrolled accumulated", "folded fsdp all weights"],
)
def test_every_gradient_is_summed_over_chips_in_float32(tmp_path, settings, elements):
    done = run(*SETTINGS, *settings, output_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (optimized,) = (tmp_path / "plans" / "compiled").glob("*/optimized.hlo")
    found = sums_over_chips(optimized)
    assert {shape.dtype for shape in found} == {"f32"}, found
    assert sum(shape.num_elements * times for shape, times in found.items()) == elements, found
