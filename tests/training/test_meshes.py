"""A step that is split over a mesh of (data, fsdp, tensor) is the step of one device, to 1e-5 over 20 steps."""

import json
import os
import subprocess
import sys

import pytest

from tests.training.runs import REPOSITORY, SAME_SUMS

pytestmark = pytest.mark.xla
LORA, ALL = "lora=all_linear_r8", "lora=none"
PAIRS = "model.tiny_arch.num_key_value_heads=2"
HSDP, TENSOR = "sharding=hsdp", "sharding=fsdp_tensor"
DATA_TENSOR = ("sharding=fsdp_tensor", "sharding.mesh={data:2,fsdp:1,tensor:2}")
UNROLLED = "model.stack=unrolled"
CASES = {
    "mistral, data 2 x fsdp 2": ("model=mistral7b", LORA, HSDP),
    "mistral, data 2 x fsdp 4": ("model=mistral7b", LORA, HSDP, "hw.num_devices=8"),
    "mistral, fsdp 2 x tensor 2": ("model=mistral7b", LORA, TENSOR),
    "mistral, data 2 x tensor 2, all weights": ("model=mistral7b", ALL, *DATA_TENSOR),
    "mistral, data 2 x fsdp 2, unrolled": ("model=mistral7b", LORA, HSDP, UNROLLED),
    "mistral, fsdp 2 x tensor 2, unrolled": ("model=mistral7b", LORA, TENSOR, UNROLLED),
    "qwen, data 2 x fsdp 2, all weights": ("model=qwen05b", ALL, HSDP),
    "qwen, fsdp 2 x tensor 2, all weights": ("model=qwen05b", ALL, TENSOR),
    "qwen, data 2 x fsdp 2 x tensor 2": (
        "model=qwen05b",
        LORA,
        "sharding=fsdp_tensor",
        "sharding.mesh.data=2",
        "hw.num_devices=8",
    ),
    "gemma, data 2 x fsdp 2": ("model=gemma3_270m", LORA, HSDP),
    "gemma, fsdp 2 x tensor 2, all weights": ("model=gemma3_270m", ALL, TENSOR, PAIRS),
    "gemma, data 2 x tensor 2, unrolled": ("model=gemma3_270m", LORA, *DATA_TENSOR, PAIRS, UNROLLED),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_one_device(case: str) -> None:
    command = [sys.executable, "-m", "tests.training.mesh_run", "hw.num_devices=4", *CASES[case]]
    environment = os.environ | SAME_SUMS
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"] < 1e-5
    assert found["parameters"] < 1e-4
    assert found["moved"] > 1e-3
    assert found["misplaced"] == []
