"""The benchmark's rival, transformers + PEFT, is lowered through the plan's own path, split as FSDP splits it."""

import json
import subprocess
import sys

import pytest

from tests.training.runs import REPOSITORY

LOWER = """
import json
from tests.benchmarks import rival
from tests.config.composing import composed
from tpu_experiments.runtime.processes.env import prepare_environment
config = composed("task=plan", "hw=v6e8", "model=mistral7b", "model.size=tiny", "lora=all_linear_r8")
prepare_environment(config.hw, is_planned=True)
program, trained = rival.lowered(config, (2, 8, 32), checkpoints="layer")
split = {a.name: list(a.axes) for a in program.arguments if any(a.axes)}
print(json.dumps({"trained": sorted(trained), "split": split, "partitions": program.num_partitions}))
"""


@pytest.mark.slow
def test_weights_adapters_and_rows_are_split_over_the_chips() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOWER], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["partitions"] == 8
    assert len(found["trained"]) == 2 * 7 * 2
    assert all(".lora_" in name for name in found["trained"])
    split = found["split"]
    assert set(found["trained"]) <= set(split)
    (head,) = (name for name in split if name.endswith("lm_head.weight"))
    assert split[head] == ["fsdp", None]
    assert split["batch/ids"] == split["batch/labels"] == [None, "fsdp", None]
