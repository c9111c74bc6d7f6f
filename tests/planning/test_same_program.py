"""The plan compiles what the run runs: the two lowered programs are equal but for the order of their arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forks

REPOSITORY = Path(__file__).parents[2]
SHARDED = ("hw.parallel=spmd", "hw.num_devices=4", "trainer.micro_batch_rows=2")
MESHES = ((), ("sharding=hsdp", "lora.dropout=0.1"), ("sharding=fsdp_tensor",))


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
