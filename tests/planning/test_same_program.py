"""The plan compiles what the run runs: the two lowered programs are equal but for the order of their arguments."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SHARDED = ("hw.parallel=spmd", "hw.num_devices=4", "trainer.micro_batch_rows=2")


def signatures(kind: str, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.planning.programs", kind, "name=x", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        SHARDED,
        ("model=gemma3_270m", "debug=smoke", "optim=adafactor"),
        ("model=qwen05b", "debug=smoke", "lora=none"),
    ],
    ids=["tiny", "spmd", "gemma", "full"],
)
def test_the_plans_training_program_is_the_runs(overrides: tuple[str, ...]) -> None:
    planned, run = signatures("plan", *overrides), signatures("run", *overrides)
    [name] = run
    assert sum(run[name]["outputs"].values()) > 50
    assert planned[name]["arguments"] == run[name]["arguments"]
    assert planned[name]["outputs"] == run[name]["outputs"]


def test_another_program_has_another_signature() -> None:
    [plain] = signatures("plan").values()
    [other] = signatures("plan", "optim.clip_norm=null").values()
    assert plain["outputs"] != other["outputs"]
