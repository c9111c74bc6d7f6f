"""One run in every parallel mode gives the same losses: rows split, gradients averaged by tokens, one writer.

Each case is the whole command in a process of its own, on a tiny Qwen2 with two curriculum stages, adapters with
dropout: its masks are the same in all of them.
"""

import math
import os

import pytest

from tests.tiers import only
from tests.training.runs import REPOSITORY, finished, losses

pytestmark = pytest.mark.xla
GOLDEN = REPOSITORY / "tests" / "golden" / "losses" / "qwen05b_smoke.txt"
COMMON = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "lora=all_linear_r8",
    "debug=smoke",
    "schedule.warmup_steps=5",
    "optim.lr=1e-3",
    "trainer.log_every_steps=1",
    "trainer.max_stage_steps=4",
)
DROPOUT = ("lora.dropout=0.1", "lora.alpha=256")
"""With adapters of such weight other masks put the losses from the second on 2e-4 to 5e-3 off."""
CASES = {
    "xla_inline": (),
    "xla_accumulated": ("trainer.micro_batch_rows=2",),
    "xla_spmd_4": ("hw.parallel=spmd", "hw.num_devices=4"),
    "xla_spmd_2_accumulated": ("hw.parallel=spmd", "hw.num_devices=2", "trainer.micro_batch_rows=2"),
    "xla_spawn": ("hw.parallel=spawn",),
    "eager_spawn_2": ("hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=2"),
    "eager_spawn_4": ("hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=4", "trainer.micro_batch_rows=1"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The eager run in one process, with dropout."""
    folder = tmp_path_factory.mktemp("reference")
    result = finished(*COMMON, *DROPOUT, "hw.runtime=eager", output_dir=folder)
    return result, losses(folder)


def test_losses_are_the_golden_ones(tmp_path):
    """Full precision in the file; 1e-5 here, since another CPU sums in another order. UPDATE_GOLDEN=1 rewrites it."""
    finished(*COMMON, "hw.runtime=eager", output_dir=tmp_path)
    ours = losses(tmp_path)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("".join(f"{loss!r}\n" for loss in ours))
    golden = [float(line) for line in GOLDEN.read_text().split()]
    assert ours == pytest.approx(golden, abs=1e-5)


IN_EVERY_RUN = ("eager_spawn_2",)


@pytest.mark.parametrize("case", only(IN_EVERY_RUN, CASES))
def test_same_losses_in_every_mode(reference, tmp_path, case):
    expected, expected_losses = reference
    result = finished(*COMMON, *DROPOUT, *CASES[case], output_dir=tmp_path)
    ours = losses(tmp_path)
    assert len(ours) == len(expected_losses) == 8
    assert max(abs(a - b) for a, b in zip(ours, expected_losses, strict=True)) < 1e-5
    assert abs(result["eval_loss"] - expected["eval_loss"]) < 1e-5
    assert abs(result["eval_loss_before"] - expected["eval_loss_before"]) < 1e-5
    assert result["tokens"] == expected["tokens"]
    assert result["sample_after"] == expected["sample_after"]
    assert math.isclose(result["perplexity"], math.exp(result["eval_loss"]), rel_tol=1e-9)
    if case.startswith("xla"):
        assert result["num_compiles"] == result["expected_programs"] == 3
        assert result["compiles_after_warmup"] == 0
