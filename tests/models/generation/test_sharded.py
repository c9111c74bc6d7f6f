"""Rows over devices: the same tokens as on one device, by two programs, each device with the cache of its own rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.generation.sharded import BUCKET, NUM_DEVICES, ROWS, SETTINGS
from tests.models.generation.small import overrides, prompts_of, with_adapter
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.passes.generation import Decoder, Sampling
from tpu_experiments.runtime.processes.launch import make_runtime

pytestmark = pytest.mark.xla


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_rows_over_four_devices_get_the_tokens_of_one(make_config, sharding):
    command = [sys.executable, "-m", "tests.models.generation.sharded", f"sharding={sharding}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiles"] == 2
    assert found["specs"] == [f"{{devices=[{NUM_DEVICES},1,1,1]{','.join(map(str, range(NUM_DEVICES)))}}}"]
    config = make_config(*overrides("qwen05b", "eager"))
    runtime = make_runtime(config)
    choice = ChoiceConfig(do_sample=True, top_k=0)
    decoder = Decoder(with_adapter(config, runtime), runtime=runtime, choice=choice, **SETTINGS)
    prompts = prompts_of(*range(4, 4 + ROWS))
    for heat in (1.2, 0.0):
        own = decoder.complete(prompts, draws=range(ROWS), bucket=BUCKET, sampling=Sampling(heat))
        assert found[str(heat)]["ids"] == own.ids_BN.tolist()
        log_probs = torch.tensor(found[str(heat)]["log_probs"])
        torch.testing.assert_close(log_probs, torch.from_numpy(own.log_probs_BN), atol=2e-5, rtol=0)
