"""The copy that text is written with: what the weights in training write, whole on each device, by a fixed number of
programs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.generation import small
from tests.training.merged_over_devices import BUCKET, SETTINGS, written
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.stacked import unstacked
from tpu_experiments.training.merged import MergedCopy

pytestmark = pytest.mark.xla
KINDS = {
    "plain": ([], {}),
    "all weights": ([], {"r": 0}),
    "lengths": ([], {"dora": True}),
    "int8": (["model.base=int8"], {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_writes_what_the_loaded_model_does(make_config, kind):
    further, changed = KINDS[kind]
    config = make_config(*small.overrides("qwen05b", "eager"), *further)
    runtime, lora = make_runtime(config), replace(small.LORA, **changed)
    source = HuggingFaceModel(config.model, seed=config.seed)
    model = build_model(source, lora=lora, seed=0, place=runtime.place, is_trained=True)
    random = torch.Generator().manual_seed(1)
    for tensor in model.trainable.values():
        tensor += torch.randn(tensor.shape, generator=random) * (0.1 if lora.r else 0.02)
    copy = MergedCopy(model, lora=lora, runtime=runtime)
    trained = unstacked(model.trainable)
    loaded = build_frozen(source, lora=lora, trained=trained, place=runtime.place)
    prompts = small.prompts_of(3, 9, 17)
    with pytest.raises(Exception, match="meta"):
        decoder_of(copy.module, runtime).complete(prompts, draws=range(3), bucket=BUCKET)
    copy.refresh()
    own = decoder_of(copy.module, runtime).complete(prompts, draws=range(3), bucket=BUCKET)
    other = decoder_of(loaded, runtime).complete(prompts, draws=range(3), bucket=BUCKET)
    assert own.ids_BN.tolist() == other.ids_BN.tolist()
    assert len(set(own.ids_BN.ravel().tolist())) > 10
    torch.testing.assert_close(
        torch.from_numpy(own.log_probs_BN), torch.from_numpy(other.log_probs_BN), atol=2e-5, rtol=0
    )
    assert any("lora_A" in name for name in copy.tensors) == (kind in ("lengths", "int8"))
    averages = {name: tensor + 0.01 for name, tensor in model.trainable.items()}
    both = MergedCopy(model, lora=lora, runtime=runtime, averages=averages)
    both.refresh(is_average=True)
    averaged = both.tensors
    for name, tensor in model.trainable.items():
        tensor.copy_(averages[name])
    both.refresh()
    assert all(torch.equal(tensor, both.tensors[name]) for name, tensor in averaged.items())
    assert not all(torch.equal(tensor, copy.tensors[name]) for name, tensor in averaged.items())


def decoder_of(module, runtime):
    choice = ChoiceConfig(do_sample=True, top_k=0)
    return Decoder(module, runtime=runtime, choice=choice, **{**SETTINGS, "num_rows": 3})


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "replicated"])
def test_four_devices_have_the_copy_whole_and_write_what_one_does(make_config, sharding):
    command = [sys.executable, "-m", "tests.training.merged_over_devices", f"sharding={sharding}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert any(":2:1" in name for name in found["names"]), "layers are folded"
    assert not any(":" in name for name in found["shapes"])
    assert found["specs"] == ["{replicated}"]
    assert found["compiles"] == 3, "merge, read, write, for three sets of weights"
    assert found["traced"] < 2 * len(found["ids"]), "two calls write an answer, and some replay a trace"
    assert found["released"]
    config = make_config(*small.overrides("qwen05b", "eager"))
    own = written(config, make_runtime(config))
    assert found["ids"] == own["ids"]
    assert found["ids"][0] != found["ids"][1] != found["ids"][2]
    torch.testing.assert_close(torch.tensor(found["log_probs"]), torch.tensor(own["log_probs"]), atol=5e-5, rtol=0)
