"""The TPU's compiler takes the step with its attention kernel, split over eight chips, and tells the kernel's work."""

import json
import re
import subprocess
import sys

import pytest

from tests.training.runs import run
from tpu_experiments.planning import compiler
from tpu_experiments.planning.hlo.program import read_program
from tpu_experiments.runtime.kernels.attention import AttentionCall, Scores
from tpu_experiments.runtime.kernels.splash import arguments_of, lowered

OVERRIDES = (
    "hw=v6e8",
    "model=mistral7b",
    "model.size=tiny",
    "model.tiny_arch.num_hidden_layers=3",
    "model.remat=offload",
)
BATCH = ("trainer.seq_len=256", "trainer.micro_batch_rows=1", "trainer.global_batch_rows=8")


def test_each_chip_runs_the_kernel_on_its_rows(tmp_path):
    settings = ("task=plan", "task.programs=train", "lora=all_linear_r8", "data=[sample_text]", "name=x")
    done = run(*settings, *OVERRIDES, *BATCH, output_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (optimized,) = (tmp_path / "plans" / "compiled").glob("*/optimized.hlo")
    text = optimized.read_text()
    program = read_program(text)
    found = program.kernels
    kernels = {kernel.name: kernel for kernel in found}  # that q and k are turned is part of them
    call = AttentionCall(1, 4, 2, 256, 16, "bfloat16", Scores(0.25, window=48))
    work = {"attention_forward": call.flops("fwd"), "attention_backward": call.flops("bwd")}
    assert {name: kernel.flops for name, kernel in kernels.items()} == work
    counts = {"attention_forward": 6, "attention_backward": 3}  # three layers, computed again backward
    assert {name: kernel.count for name, kernel in kernels.items()} == counts
    forward = kernels["attention_forward"]
    assert forward.operand_shapes[:3] == ("bf16[1,4,256,16]", "bf16[1,2,256,16]", "bf16[1,2,256,16]")
    # Gradients are summed over the chips behind the loop over layers, with the step's own sums, but for those of heads,
    # once in each of three layers.
    assert sum(transfer.count for transfer in program.transfers if transfer.kind == "all-reduce") <= 2 + 3
    # What the layers save is written into a buffer that nothing was written into before, here in the host's memory
    # (space 5): of three layers, one row's input.
    assert re.search(r"bf16\[3,1,256,64\]\{\S*S\(5\)\} custom-call\(\), custom_call_target=\"AllocateBuffer\"", text)


@pytest.mark.parametrize("rotation_dtype", ["", "float32"])
@pytest.mark.parametrize(("direction", "length"), [("forward", 8192), ("backward", 8192), ("backward", 1024)])
def test_the_compiler_takes_the_longest_row_that_is_held_whole(direction, length, rotation_dtype, tmp_path):
    """8,192 tokens of 128 features, and one block, on a machine whose operations have 16 MiB of vector memory by
    default."""
    call = AttentionCall(1, 8, 2, length, 128, "bfloat16", Scores(0.1), rotates=True, rotation_dtype=rotation_dtype)
    assert call.is_whole
    arguments = [{"axes": [], "alias": None}] * len(arguments_of(call, direction=direction))
    request = {"topology": "v5e:1x1", "num_chips": 1, "num_replicas": 1, "mesh": {}, "arguments": arguments}
    (tmp_path / compiler.REQUEST).write_text(json.dumps(request))
    (tmp_path / compiler.PROGRAM).write_bytes(lowered(call, direction=direction, target="tpu"))
    subprocess.run([sys.executable, "-m", "tpu_experiments.planning.compiler", str(tmp_path)], check=True)
    answer = json.loads((tmp_path / compiler.ANSWER).read_text())
    assert "error" not in answer, answer["error"]
    (kernel,) = read_program((tmp_path / compiler.OPTIMIZED).read_text()).kernels
    assert kernel.name == f"attention_{direction}"
    assert kernel.flops == call.flops("fwd" if direction == "forward" else "bwd")
