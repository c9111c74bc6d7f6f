"""The plan compiles what the run runs: the two lowered programs are equal but for the order of their arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forks

REPOSITORY = Path(__file__).parents[2]
FULL = ("model=mistral7b", "model.init=random", "data=uk_law", "lora=none", "hw=v6e16", "hw.device=cpu")
SHARDED = ("hw.parallel=spmd", "hw.num_devices=4", "trainer.micro_batch_rows=2")
SIZES = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 1}
PADDED = ("model=qwen05b", "model.size=tiny", "model.stack=unrolled", "sharding=replicated", "lora=all_linear_r8")
PADDED = (*PADDED, *(f"model.tiny_arch.{key}={n}" for key, n in SIZES.items()))
"""Weights that a step writes its adapters into (models/adapters/padded.py)."""
FOLDED = (*PADDED, "model.stack=scanned", "model.tiny_arch.num_hidden_layers=2")
MESHES = (
    (),
    ("sharding=hsdp", "lora.dropout=0.1"),
    ("sharding=fsdp_tensor",),
    PADDED,
    FOLDED,
    (*FOLDED, "sharding=fsdp"),
)


def signatures(kind: str, *overrides: str) -> dict[str, Any]:
    command = ["-m", "tests.planning.programs", kind, "name=x", *overrides]
    done = forks.run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("mesh", [MESHES[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[1:])])
def test_the_plans_training_program_is_the_runs(mesh: tuple[str, ...]) -> None:
    planned, run = signatures("plan", *SHARDED, *mesh), signatures("run", *SHARDED, *mesh)
    [name] = run
    assert len(run[name]["outputs"]) > 40, "outputs that differ have hashes that differ"
    assert planned[name]["arguments"] == run[name]["arguments"]
    assert planned[name]["outputs"] == run[name]["outputs"]


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_a_model_split_over_hosts_is_lowered_for_all_their_chips(num_hosts: int) -> None:
    """Nine matrices, two of them without layers, and two moments of each in sixteen parts; nothing is compiled."""
    found = signatures("plan", *FULL, f"hw.num_hosts={num_hosts}")
    [train] = [signature for name, signature in found.items() if name.startswith("train")]
    trained = {name: count for name, count in train["arguments"].items() if name.startswith("f32[")}
    assert sum(count for name, count in trained.items() if "16" in name.partition("] ")[2]) == 27
