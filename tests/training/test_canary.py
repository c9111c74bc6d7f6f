"""The layout canary: right layouts pass, swapped shards and half a sum do not, and asking changes nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forks
from tests.tiers import only
from tests.training.runs import SAME_SUMS, records, run
from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.adamw8bit import AdamW8bit
from tpu_experiments.training.canary import STOP_COSINE, WARN_COSINE, WARN_RATIO, Findings, first_slots, shard_rows

pytestmark = pytest.mark.xla
TRAINER = '''
from tpu_experiments.training.trainer import Trainer


class HalfTrainer(Trainer):
    """Its gradients are a mean over the processes where they should be a sum."""

    def build(self):
        super().build()
        self.step.sum_over_processes = self.half

    def half(self, tensors):
        summed = self.runtime.sum_over_processes(tensors)
        if len(tensors) == 1:  # the number of supervised tokens
            return summed
        return [*(tensor / self.runtime.world_size for tensor in summed[:-1]), summed[-1]]
'''
SMALL = (
    "model=qwen05b",
    "data=[sample_text]",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "debug=smoke",
    "hw.runtime=eager",
    "hw.parallel=spawn",
    "hw.num_devices=2",
    "trainer.log_every_steps=1",
    "trainer.max_stage_steps=2",
    "trainer.max_eval_rows=8",
    "sample.max_new_tokens=0",
    "name=canary",
)


@pytest.fixture(scope="module")
def on_four_devices() -> dict[str, Any]:
    """Findings on a mesh of four virtual devices in bfloat16, weights split over all, adapters with dropout."""
    command = ["-m", "tests.training.canary_run", "model=qwen05b", "data=[sample_text]"]
    command += ["lora=all_linear_r8", "lora.dropout=0.1", "hw.num_devices=4", "model.dtype=bfloat16"]
    done = forks.run(command, env=os.environ | SAME_SUMS)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def findings(values: dict[str, Any]) -> Findings:
    return Findings(**{name: value for name, value in values.items() if name != "smallest"})


@pytest.mark.slow
def test_the_right_layout_is_far_inside_the_bound(on_four_devices):
    right = findings(on_four_devices["right"])
    assert set(right.cosine) == {"attention", "mlp"}
    assert right.smallest > 0.999
    assert not right.exceeds(cosine=WARN_COSINE, ratio=WARN_RATIO)
    assert on_four_devices["restored"]


@pytest.mark.slow
@pytest.mark.parametrize("case", only(["layer"], ["shards", "layer"]))
def test_swapped_shards_are_found(on_four_devices, case):
    wrong = findings(on_four_devices[case])
    assert wrong.smallest < STOP_COSINE
    assert wrong.exceeds(cosine=STOP_COSINE, ratio=1.0)
    assert wrong.loss < 0.01  # which a loss curve would not have shown


@pytest.mark.slow
def test_moments_of_8_bits_are_compared_by_their_values() -> None:
    """Codes themselves are numbers around 127, of which any two are alike."""
    command = ["-m", "tests.training.canary_run", "model=qwen05b", "data=[sample_text]", "optim=adamw8bit"]
    command += ["lora=all_linear_r8", "lora.r=64", "hw.num_devices=4", "model.dtype=bfloat16"]
    done = forks.run(command, env=os.environ | SAME_SUMS)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not findings(found["right"]).exceeds(cosine=0.999, ratio=WARN_RATIO)
    assert findings(found["shards"]).smallest < STOP_COSINE
    assert found["restored"]


def test_the_first_moment_of_8_bits_is_decoded() -> None:
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    grads = {"model.layers.0:2:1.up_proj.lora_A": torch.randn(2, 64, 96), "norm.weight": torch.randn(7)}
    states = []
    for kind in (AdamW, AdamW8bit):
        optimizer = kind(**settings)
        _, state = optimizer.update(
            grads, grads, optimizer.init(grads), lr=torch.ones(1), decay=dict.fromkeys(grads, 0.0)
        )
        states.append(first_slots(state))
    exact, in_8_bits = states
    assert exact.keys() == in_8_bits.keys()
    assert set(exact) == {f"model.layers.{i}.up_proj.lora_A/first" for i in (0, 1)} | {"norm.weight/first"}
    for name, value in exact.items():
        assert in_8_bits[name].dtype == torch.float32
        assert (in_8_bits[name] - value).norm() < 0.02 * value.norm()
        assert name == "norm.weight/first" or not torch.equal(in_8_bits[name], value)


@pytest.fixture
def lab(tmp_path) -> dict[str, str]:
    (tmp_path / "my_half.py").write_text(TRAINER)
    return {"PYTHONPATH": str(tmp_path)}


def test_half_a_sum_ends_the_run_before_its_first_step(lab, tmp_path):
    wrong = ("plugins=[my_half]", "trainer._target_=my_half.HalfTrainer", "trainer.canary.when=always")
    done = run(*SMALL, *wrong, output_dir=tmp_path, env=lab)
    assert done.returncode == 1, done.stdout + done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "the first gradients on 2 devices are not those of one: loss 0.000 % off, gradient norm 50.000 %" in message
    assert not list(tmp_path.glob("*/checkpoints/*"))


@pytest.mark.slow
def test_a_run_that_asked_is_the_run_that_did_not(tmp_path):
    results = []
    for when in ("always", "never"):
        done = run(*SMALL, f"trainer.canary.when={when}", "trainer.trace_every_steps=1", output_dir=tmp_path / when)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads((tmp_path / when / "canary" / "result.json").read_text()))
    asked, silent = results
    assert asked["canary"]["grad_norm"] < 1e-5
    assert min(asked["canary"]["cosine"].values()) > 0.999999
    assert silent["canary"] is None
    assert numbers(tmp_path / "always") == numbers(tmp_path / "never")
    adapters = [(tmp_path / when / "canary" / "adapter" / "adapter_model.safetensors") for when in ("always", "never")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.slow
def test_split_state_is_read_between_steps_without_a_program(tmp_path):
    """Every weight trained and split over four devices, asked, and saved at every step."""
    split = ("lora=none", "hw.parallel=spmd", "hw.num_devices=4", "sharding=fsdp_tensor", "checkpoint.every_steps=1")
    common = [each for each in SMALL if not each.startswith(("lora", "hw."))]
    settings = ("trainer.canary.when=always", "trainer.max_stage_steps=4", "optim=adafactor")
    done = run(*common, *split, *settings, output_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "canary" / "result.json").read_text())
    assert result["num_compiles"] == result["expected_programs"] == 2
    assert set(result["canary"]["cosine"]) == {"attention", "mlp", "embeddings", "other"}
    assert min(result["canary"]["cosine"].values()) > 0.99999


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    return [(r["step"], r.get("train/loss"), r.get("eval/loss")) for r in records(folder)]


def test_every_device_has_a_row_and_micro_batches_take_turns():
    spmd = Geometry(global_rows=24, micro_rows=2, accumulation=3, num_shards=4, seq_len=8)
    assert shard_rows(spmd, world_size=1) == [0, 8 + 2, 16 + 4, 6]
    assert shard_rows(spmd, world_size=4) == [0, 6 + 2, 12 + 4, 18]
    assert shard_rows(spmd, world_size=2) == [0, 6 - 6 + 4 + 2, 12 + 8, 12 + 2]
