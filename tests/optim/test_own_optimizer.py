"""An optimizer of one's own is a class and a YAML: Lion trains, resumes, is planned, and shares a pack's program."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.composing import composed
from tests.optim.lion import Lion
from tests.training.runs import finished
from tests.training.tiny import Run, configured, random_batch
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity
from tpu_experiments.config.packs import why_alone
from tpu_experiments.models.adapters.lora import scale_of
from tpu_experiments.optim.updates import optimizer_of
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.work import analytic_memory
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.training.pack import PackedStep

pytestmark = pytest.mark.xla
LION = ("optim=base", "plugins=[tests]", "optim._target_=tests.optim.lion.Lion", "+optim.options={betas: [0.9, 0.99]}")
TINY = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")


def test_every_fact_of_a_parameter_reaches_it() -> None:
    """At the first step the sign is the gradient's: each moves by its rate, and decays by it where it does."""
    more = ("optim.weight_decay=0.5", "optim.b_lr_ratio=4", "optim.no_decay=['*k_proj*']", "optim.ema=0.9")
    names = [f"model.layers.0:2:1.self_attn.{part}" for part in ("q_proj.lora_A", "q_proj.lora_B", "k_proj.lora_A")]
    parameters = {name: torch.ones(2, 3, 4) for name in names}
    updates = configured(composed(*LION, *more))(parameters)
    grads = {name: torch.full_like(p, -0.3) for name, p in parameters.items()}
    found, state = updates.update(parameters, grads, updates.init(parameters), lr=torch.tensor([0.01]))
    for name, moved in zip(names, (0.01 * (1 - 0.5), 0.04 * (1 - 0.5), 0.01), strict=True):
        torch.testing.assert_close(found[name], torch.full((2, 3, 4), 1 + moved))
        assert list(state[name]) == ["momentum", "average_lag"]


@pytest.mark.slow
def test_xla_trains_as_plain_torch_does() -> None:
    from tpu_experiments.runtime.xla.device import XlaRuntime

    found = []
    for kind in ("eager", "xla"):
        config = composed(*TINY, *LION, "hw=cpu", f"hw.runtime={kind}", "optim.b_lr_ratio=4")
        runtime = EagerRuntime(config.hw) if kind == "eager" else XlaRuntime(config.hw, sharding=config.sharding)
        run = Run(config, runtime, updates=configured(config))
        assert isinstance(run.step.updates.optimizer, Lion)
        found.append(run.losses([random_batch(i % 2, lr=1e-3) for i in range(6)]))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0][-1] < found[0][1] - 0.05


@pytest.mark.parametrize("runtime", ["eager", pytest.param("xla", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(runtime: str, tmp_path: Path) -> None:
    words = ("--config-dir", "tests/optim/conf", "plugins=[tests]", "optim=lion", f"hw.runtime={runtime}", "name=lion")
    words += ("debug=smoke", "data=[sample_text]", "trainer.max_stage_steps=4", "trainer.eval_every_steps=0")
    words += ("sample.max_new_tokens=0", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    finished(*words, output_dir=tmp_path)
    last = tmp_path / "lion" / "checkpoints" / "step_00000004"
    whole = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert set(whole) == {"optimizer.safetensors", "parameters.safetensors"}
    assert b"momentum" in whole["optimizer.safetensors"]
    (tmp_path / "lion" / "result.json").unlink()
    shutil.rmtree(last)
    finished(*words, output_dir=tmp_path)
    assert {path.name: path.read_bytes() for path in last.glob("*.safetensors")} == whole


def test_a_plan_knows_the_bytes_of_its_state() -> None:
    """4 bytes an element, from shapes on the meta device; AdamW's are 8."""
    for adapters in ("lora=none", "lora=all_linear_r16"):
        lion, adamw = (composed("model=qwen05b", "hw=v5e1", adapters, *more) for more in (LION, ()))
        ours, theirs = (
            analytic_memory(config.model.arch, step=step_settings(config, resolve_stages(config)[0].geometry))
            for config in (lion, adamw)
        )
        assert ours.optimizer == pytest.approx(ours.adapters)
        assert theirs.optimizer == pytest.approx(2 * ours.optimizer)
        assert replace(ours, optimizer=theirs.optimizer) == theirs


def test_points_with_optimizers_of_their_own_share_a_program() -> None:
    """One adapter by Lion and one by AdamW, in one program: each trains as alone."""
    configs = [composed(*TINY, "hw=cpu", "hw.runtime=eager", *more) for more in (LION, ())]
    assert [why_alone(config) for config in configs] == [None, None]
    alone = [Run(config, EagerRuntime(config.hw), updates=configured(config)) for config in configs]
    packed = [Run(config, EagerRuntime(config.hw), updates=configured(config)) for config in configs]
    common = Run(configs[0], EagerRuntime(configs[0].hw)).model.module.train()
    step = PackedStep(common, [run.step for run in packed])
    scales, none = torch.full((2,), scale_of(configs[0].lora)), torch.zeros(2, dtype=torch.int32)
    batches = [random_batch(number, rows=2, lr=1e-2) for number in range(2)]
    before = [dict(run.parameters) for run in packed]
    found = step(before, [run.state for run in packed], batches, scales=scales, thresholds=none)
    for run, batch, (parameters, state, output) in zip(alone, batches, found, strict=True):
        assert run.losses([batch]) == pytest.approx([float(output.loss)], abs=1e-5)
        for name, value in parameters.items():
            is_other = (value - run.parameters[name]).abs() > 1e-4  # the sign of a gradient near 0 may differ
            assert float(is_other.float().mean()) < 0.01
            assert state[name].keys() == run.state[name].keys()
    moved = [float((new[name] - start[name]).abs().max()) for start, (new, *_) in zip(before, found, strict=True)
             for name in new if name.endswith("lora_B")]  # fmt: skip
    assert moved == pytest.approx([1e-2] * len(moved), rel=1e-3)
    assert {tuple(slots) for _, state, _ in found for slots in state.values()} == {
        ("count",),
        ("momentum",),
        ("first", "second"),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "{beta: [0.9, 0.99]}",
            r"^optim._target_=tests.optim.lion.Lion with .*; Lion says: missing .*'betas'; it ",
        ),
        ("{betas: [0.9, 0.99], eps: 1}", r"Lion says: got an unexpected keyword argument 'eps'"),
    ],
)
def test_other_options_are_refused(options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimizer_of(composed(*LION[:-1], f"+optim.options={options}"))


class Old(Lion):
    """As an optimizer of one's own was before rates and decay were facts of a parameter."""

    def update(self, parameters, grads, state, *, lr):  # type: ignore[no-untyped-def,override]
        return super().update(parameters, grads, state, lr=lr, decay=dict.fromkeys(parameters, 0.0))


def test_an_update_without_decay_is_refused() -> None:
    config = composed(*LION)
    old = replace(config, optim=replace(config.optim, _target_=f"{__name__}.Old"))
    with pytest.raises(ConfigError, match=r"Old says: got an unexpected keyword argument 'decay'; it takes .* decay\)"):
        optimizer_of(old)


def test_options_are_of_the_runs_identity_and_none_are_not() -> None:
    config = composed(*LION)
    assert identity(config)["optim.options.betas"] == [0.9, 0.99]
    assert "optim.options" not in identity(replace(config, optim=replace(config.optim, options={})))
