"""The forward canary: right programs pass, six faults of device-only code do not, and asking changes nothing."""

import json
import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import forks
from tests.config.composing import composed
from tests.tiers import only
from tests.training.runs import SAME_SUMS, records, run
from tpu_experiments.checkpoint.state import to_host
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.canary import HostModel
from tpu_experiments.training.forward_canary import (
    PADDING,
    STOP,
    WARN,
    LossFindings,
    _bits,
    check_losses,
    held_out_documents,
    probe_rows,
    rounded_values,
)
from tpu_experiments.training.row_lengths import measure_rows
from tpu_experiments.training.trainer import Trainer

SMOKE = ("data=[sample_text]", "debug=smoke", "hw.num_devices=1")
TRAINED = ("model=tiny", "model.size=full", *SMOKE)
FLASH = "model.attention=flash"


# ---- faults of device-only code -----------------------------------------------------------------------------

MUTANTS = {"rope", "window", "causal", "segment", "stale", "heads", "bfloat16"}
"""Those of tests/training/device_mutants.py."""
NO_WINDOW = {"window"}
KERNELS: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    "float32": ("kernel", (*TRAINED, FLASH, "model.dtype=float32"), NO_WINDOW),
    "bfloat16": ("kernel", (*TRAINED, FLASH, "model.dtype=bfloat16"), {*NO_WINDOW, "bfloat16"}),
    "unrolled": ("kernel", (*TRAINED, FLASH, "model.dtype=float32", "model.stack=unrolled", "lora=none"), NO_WINDOW),
    "int8": ("kernel", (*TRAINED, FLASH, "model.dtype=bfloat16", "model.base=int8"), {*NO_WINDOW, "bfloat16"}),
    "windows": (
        "kernel",
        ("model=gemma3_270m", *SMOKE, "lora=none", FLASH, "trainer.seq_len=128", "model.dtype=bfloat16"),
        {"bfloat16"},
    ),
    "encoder": (
        "kernel",
        ("experiment=modernbert_mlm", "debug=smoke", "hw.num_devices=1", FLASH, "model.dtype=bfloat16"),
        {"bfloat16"},
    ),
    "diffusion": (
        "kernel",
        ("experiment=diffusion_llama", "debug=smoke", "hw.num_devices=1", FLASH, "model.dtype=bfloat16"),
        {*NO_WINDOW, "bfloat16"},
    ),
    "sdpa": ("none", (*TRAINED, "model.attention=sdpa", "model.dtype=float32"), set()),
    "sdpa_bfloat16": ("none", (*TRAINED, "model.attention=sdpa", "model.dtype=bfloat16"), set()),
    "drawn": ("none", ("experiment=deberta_v3_rtd", "debug=smoke", "hw.num_devices=1", "model.dtype=bfloat16"), set()),
}
"""Attention, the model, and the mutants that are no faults of it: no window, or bfloat16 already."""


@pytest.mark.xla
@pytest.mark.parametrize("case", only(["float32"], KERNELS))
def test_faults_of_device_only_code_are_found(case):
    """On torch_xla's CPU device, with the TPU's kernel interpreted."""
    kernel, overrides, harmless = KERNELS[case]
    done = forks.run(["-m", "tests.training.device_mutants", kernel, *overrides], env=os.environ | SAME_SUMS)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ratios = {name: findings["ratio"] for name, findings in found.items()}
    assert ratios.pop("clean") < WARN
    assert set(ratios) == (MUTANTS if kernel == "kernel" else set(ratios))
    assert ratios
    assert {name for name, ratio in ratios.items() if not ratio > STOP} == harmless, ratios


# ---- right programs -----------------------------------------------------------------------------------------

RECIPE = ("debug=smoke", "hw.runtime=eager", "hw.num_devices=1")
RIGHT = {
    "adapters": (*TRAINED, "hw.runtime=eager", "model.dtype=bfloat16", FLASH),
    "float32": (*TRAINED, "hw.runtime=eager", "model.dtype=float32", "optim.ema=0.9"),
    "all_weights": ("model=llama_mini", *SMOKE, "hw.runtime=eager", "lora=none", "model.dtype=bfloat16"),
    "int8": (*TRAINED, "hw.runtime=eager", "model.base=int8", "model.dtype=bfloat16"),
    "masked": ("experiment=modernbert_mlm", *RECIPE, "model.dtype=bfloat16"),
    "classes": ("experiment=modernbert_classify", *RECIPE, "model.dtype=bfloat16"),
    "diffusion": ("experiment=diffusion_llama", *RECIPE, "model.dtype=bfloat16"),
    "drawn": ("experiment=deberta_v3_rtd", *RECIPE, "model.dtype=bfloat16"),
    "xlstm": ("experiment=xlstm_pretrain", *RECIPE),
    "ternary": ("experiment=bitnet_pretrain", *RECIPE),
    "rounded": ("experiment=lr_qat", *RECIPE),
    "two_stages": ("model=qwen05b", *RECIPE, "data=[sample_text,sample_chat]"),
}


def built(tmp_path: Any, *overrides: str) -> Trainer:
    """A trainer in plain torch as it is before its first step."""
    config = composed(*overrides, "trainer.canary.when=always", f"output_dir={tmp_path}")
    config = measure_rows(config, is_lookup=False)
    parts: Any = {"inputs": make_inputs(config, resolve_stages(config)), "outputs": None, "watch": Stopwatch()}
    trainer = Trainer(config, EagerRuntime(config.hw), **parts)
    trainer.build()
    return trainer


@pytest.mark.parametrize("case", only(["adapters", "classes", "all_weights"], RIGHT))
def test_right_programs_pass_and_are_left_as_they_were(case, tmp_path):
    trainer = built(tmp_path, *RIGHT[case])
    before = {name: tensor.clone() for name, tensor in to_host(trainer.parameters).items()}
    host = HostModel(trainer)
    found = check_losses(trainer, host)
    assert found is not None
    assert host.trainer.model.module.dtype == torch.float32  # also where no weight is frozen
    assert found["difference"] <= WARN * found["rounding"], found
    after = to_host(trainer.parameters)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(slot.any() for slots in trainer.state.values() for slot in slots.values() if slot.ndim)


def test_rows_have_several_documents_each_and_pass_the_window(tmp_path):
    """Gemma 3's tiny form has a window of 32 tokens."""
    settings = ("trainer.seq_len=128", "trainer.canary.max_tokens=64", "hw.runtime=eager")
    trainer = built(tmp_path, "model=gemma3_270m", *SMOKE, *settings)
    longest = held_out_documents(trainer)[0]
    rows = probe_rows(trainer)
    assert [row.ids_GT.shape[1] for row in rows] == [40 + 16, 16, 16, 16]
    for number, row in enumerate(rows):
        segments, positions = row.segments_GT[0], row.positions_GT[0]
        assert segments.max() >= 1
        assert not segments[-PADDING - number :].any()
        starts = np.flatnonzero(np.diff(segments, prepend=0) > 0)
        assert (positions[starts] == 0).all()
    first = rows[0].ids_GT[0][rows[0].segments_GT[0] == 1]
    assert len(first) == 40
    assert first.tolist() == [longest.ids[0], *longest.ids[-39:]]


# ---- what is reckoned ---------------------------------------------------------------------------------------


def test_values_are_rounded_as_a_cast_rounds_them():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    with torch.no_grad(), rounded_values(layer, bits=8):
        rounded = layer(x)
    with torch.no_grad():
        expected = layer(x.bfloat16().float()).bfloat16().float()
        assert torch.equal(rounded, expected)
        assert not torch.equal(layer(x), expected)


def test_a_difference_is_in_units_of_what_rounding_changes():
    expected = [2.0, 4.0]
    right = LossFindings([2.002, 3.998], expected, [[2.001, 4.001], [2.002, 4.002]])
    assert right.rounding == pytest.approx(1e-3)
    assert right.ratio == pytest.approx(2)
    assert LossFindings([2.0, 4.0], expected, [expected, expected]).rounding == 4.0 * 2**-22
    one_off = replace(right, found=[2.001, 9.0])
    assert one_off.ratio > STOP
    assert replace(one_off, draws=True).ratio == pytest.approx(1)
    assert math.isnan(replace(one_off, found=[2.001, math.nan], draws=True).ratio)


def test_a_tpu_multiplies_float32_as_bfloat16():
    assert [_bits(composed(hw, "model.dtype=float32")) for hw in ("hw=cpu", "hw=v6e1")] == [20, 8]


# ---- runs ---------------------------------------------------------------------------------------------------

SMALL = (*SMOKE, "model=qwen05b", "trainer.max_stage_steps=2", "trainer.log_every_steps=1", "sample.max_new_tokens=0")
DAMAGE = '''
import torch

from tpu_experiments.training.trainer import Trainer


class DamagedTrainer(Trainer):
    """One weight of its device is not that of the checkpoint."""

    def build(self):
        super().build()
        weight = dict(self.model.module.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        with torch.no_grad():
            weight.copy_(weight.roll(1, dims=0))
'''


def test_a_device_that_computes_another_model_ends_the_run_before_its_first_step(tmp_path):
    (tmp_path / "my_damage.py").write_text(DAMAGE)
    lab = {"PYTHONPATH": str(tmp_path)}
    wrong = ("plugins=[my_damage]", "trainer._target_=my_damage.DamagedTrainer", "trainer.canary.when=always")
    done = run(*SMALL, *wrong, "hw.runtime=eager", "name=canary", output_dir=tmp_path, env=lab)
    assert done.returncode == 1, done.stdout + done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "cpu; the device's held-out losses are not those of the host's CPU: " in message
    assert "and the limit is 6; try model.attention=eager" in message
    assert not list(tmp_path.glob("*/checkpoints/*"))
    assert not list(tmp_path.glob("*/result.json"))


@pytest.mark.xla
@pytest.mark.slow
def test_a_run_that_asked_is_the_run_that_did_not_and_compiles_nothing_more(tmp_path):
    """A resumed run that asks finds its programs in the cache: tests/training/test_compile_cache.py."""
    numbers = []
    for when in ("never", "always"):
        done = run(*SMALL, "name=canary", f"trainer.canary.when={when}", output_dir=tmp_path / when)
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads((tmp_path / when / "canary" / "result.json").read_text())
        assert (result["num_compiles"], result["compiles_after_warmup"]) == (2, 0)
        numbers.append([(r["step"], r.get("train/loss"), r.get("eval/loss")) for r in records(tmp_path / when)])
    assert result["canary"]["losses"]["difference"] <= WARN * result["canary"]["losses"]["rounding"]
    assert numbers[0] == numbers[1]
