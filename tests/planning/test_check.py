"""What task=train knows of its memory before it starts: refused, warned of or passed, and nothing written."""

import json
import logging
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.config.composing import composed
from tests.jobs import of_tiny_job
from tests.planning.examples import plan_that_does_not_fit
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import with_lengths
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import config_hash
from tpu_experiments.config.schema import Config
from tpu_experiments.models.huggingface import ShapesOfModel
from tpu_experiments.planning.analytic import estimated_memory
from tpu_experiments.planning.check import check_memory, finding, remedies_for
from tpu_experiments.planning.report import plan_json
from tpu_experiments.planning.stored_plans import plan_folders, programs_key, sizes_of

REPOSITORY = Path(__file__).parents[2]
OPEN = ("model=mistral7b", "data=ultrachat_ro", "hw=v5e8", "sharding=replicated")
MISTRAL = (*OPEN, "trainer.seq_len=128", "trainer.global_batch_rows=16")
LONG = (*MISTRAL, "trainer.seq_len=2048", "trainer.global_batch_rows=64", "trainer.micro_batch_rows=8")
NO_TPU = "error: hw=v5e8 asks for a TPU and this machine has none"


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """run.py with nothing else in the folder that it may write to."""
    command = ["run.py", "~local", f"output_dir={folder}/outputs", *of_tiny_job(overrides)]
    return forks.run(command)


def store(folder: Path, config: Config, *, name: str = "known", **changes: Any) -> Path:
    """A compiled plan that does not fit, as task=plan would write it for this config."""
    key = programs_key(config, config.model.arch, resolve_stages(config))
    plan = replace(plan_that_does_not_fit(), programs_key=key)
    file = folder / "plans" / name / "plan.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**plan_json(plan), **changes}))
    return file


@cache
def key_of(*overrides: str) -> str:
    config = composed(*overrides)
    return programs_key(config, config.model.arch, resolve_stages(config))


@pytest.mark.parametrize("rows", [MISTRAL, pytest.param(OPEN, marks=pytest.mark.slow)])
def test_weights_that_do_not_fit_are_refused_before_the_missing_tpu(tmp_path: Path, rows: tuple[str, ...]) -> None:
    """7,241,732,096 trained parameters on every chip: 27 GiB in float32 and twice that for AdamW."""
    done = train(tmp_path, *rows, "lora=none")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: hw=v5e8; trained weights 26.98, optimizer state 53.96, gradients 13.49 are 94.42"
    )
    assert "more than the 15.75 GiB that one program may take of a chip; " in done.stderr
    assert ("nearest settings that fit: " in done.stderr) == (rows == MISTRAL)
    assert done.stderr.endswith("; or start all the same with trainer.plan_check=warn.\n")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_is_only_estimated_or_overridden_is_a_warning(tmp_path: Path) -> None:
    for overrides, said in (
        (LONG, "hw=v5e8; formulas put the step at 21.28 GiB per chip, more than the 15.75 GiB"),
        ((*MISTRAL, "lora=none", "trainer.plan_check=warn"), "gradients 13.49 are 94.42 GiB per chip"),
    ):
        warned, refused = train(tmp_path, *overrides).stderr.splitlines()
        assert " warning: " in warned
        assert said in warned
        assert refused.startswith(NO_TPU)
    assert not list(tmp_path.iterdir())


def test_off_and_a_run_that_fits_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for overrides in ((*MISTRAL, "lora=none", "trainer.plan_check=off"), MISTRAL, ("hw=cpu",)):
        check_memory(composed(*overrides, f"output_dir={tmp_path}"))
    assert not caplog.records


def test_what_depends_on_rows_is_not_said_before_they_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows that are assumed here, 32,768 tokens on a chip at once, would not fit."""
    words = (*OPEN, "trainer.micro_batch_rows=8", "model.step_tokens=262144", f"output_dir={tmp_path}")
    config = composed(*words)
    check_memory(config)
    assert not caplog.records
    check_memory(with_lengths(config, None))
    assert "formulas put the step" in caplog.text


def test_the_state_under_a_trainer_of_ones_own_is_not_certain(tmp_path: Path) -> None:
    full = ("model=qwen05b", "data=uk_law", "hw=v5e1", "lora=none", "hw.chip.program_hbm_gib=5")
    full += ("trainer.seq_len=128", "trainer.global_batch_rows=16")
    config = composed(*full, f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"trained weights 1\.84, optimizer state 3\.68, gradients 0\.92 are 6\.44"):
        check_memory(config)
    foreign = replace(config, trainer=replace(config.trainer, _target_="mine.Trainer"))
    missing = replace(config, optim=replace(config.optim, _target_="mine.Plain"))
    assert finding(missing) is None, "what is wrong is said later, in a sentence"
    found = finding(foreign)
    assert found is not None
    assert found.certainty == "estimated"


def test_a_frozen_base_can_be_too_much_by_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(composed(*MISTRAL, "model.dtype=float32", "hw=v5e1", f"output_dir={tmp_path}"))
    said = str(caught.value)
    assert said.startswith(
        "hw=v5e1; base weights 26.98, adapters 0.16, optimizer state 0.31, gradients 0.16 are 27.60 GiB"
    )
    assert "nearest settings that fit: model.base=int8 (estimated 10.43 GiB per chip)" in said
    with pytest.raises(ConfigError) as caught:
        check_memory(composed(*MISTRAL, "hw=v5e1", "hw.chip.program_hbm_gib=5", f"output_dir={tmp_path}"))
    said = str(caught.value)
    assert "half of trainer.seq_len fits on hw=v5e1: the least of them is estimated to take" in said
    assert " trainer.micro_batch_rows=1, the smallest machine of conf/hw that is estimated to hold it" in said


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ((), "model.remat=layer_inputs (estimated 5.94"),
        (("model.saved=[up_proj]",), "model.remat=layer_inputs model.saved=[] (estimated 5.94"),
        (("trainer.micro_batch_rows=8",), "model.remat=layer_inputs trainer.micro_batch_rows=4 (estimated 10.98"),
        (("trainer.micro_batch_rows=8", "model.remat=layer_inputs"), "trainer.micro_batch_rows=4 (estimated 10.98"),
    ],
)
def test_to_save_less_is_a_remedy(words: tuple[str, ...], advice: str) -> None:
    rows = ("trainer.seq_len=4096", "trainer.global_batch_rows=64", "trainer.micro_batch_rows=1")
    config = composed("model=llama31_8b", "data=ultrachat_ro", "hw=v5e8", "model.remat=save_dots", *rows, *words)
    arch, geometry = config.model.arch, resolve_stages(config)[0].geometry
    memory = estimated_memory(config, arch, geometry=geometry)
    assert remedies_for(config, arch, memory=memory, geometry=geometry)[0].startswith(advice)


def test_a_plan_of_the_same_programs_is_believed(tmp_path: Path) -> None:
    given = (*MISTRAL, f"output_dir={tmp_path}")
    config = composed(*given)
    file = store(tmp_path, config)
    with pytest.raises(ConfigError) as caught:
        check_memory(config)
    assert str(caught.value) == (
        "hw=v5e8; the program train of this run was compiled for v6e:2x4 and takes 36.22 of 31.25 GiB per chip "
        f"({file}, libtpu 0.0.21); nearest settings that fit: trainer.micro_batch_rows=1; or start all the same with "
        "trainer.plan_check=warn."
    )
    check_memory(composed(*given, "lora.r=8"))
    with pytest.raises(ConfigError, match=r"takes 36\.22"):
        check_memory(composed(*given, "lora=all_linear_r16", "optim.lr=1e-5", "name=other"))


def test_a_plan_that_fits_wins_over_the_formulas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = composed(*LONG, f"output_dir={tmp_path}")
    check_memory(config)
    assert "formulas put the step" in caplog.text
    caplog.clear()
    store(tmp_path, config, fits=True)
    check_memory(config)
    assert not caplog.records


def test_an_analytic_plan_is_not_known(tmp_path: Path) -> None:
    config = composed(*MISTRAL, f"output_dir={tmp_path}")
    store(tmp_path, config, method="analytic")
    check_memory(config)


def test_a_torn_plan_is_passed_over_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = composed(*MISTRAL, f"output_dir={tmp_path}")
    file = store(tmp_path, config)
    file.write_text(file.read_text()[:300])
    check_memory(config)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{file} is skipped: it is not JSON")


@pytest.mark.parametrize("seen", ["outputs", "outputs/sweeps/lr"])
@pytest.mark.parametrize("made", ["outputs", "outputs/sweeps/ranks"])
def test_plans_of_sweeps_are_found_from_anywhere(tmp_path: Path, made: str, seen: str) -> None:
    config = composed(*MISTRAL, f"output_dir={tmp_path}/{seen}")
    store(tmp_path / made, config)
    assert f"{tmp_path}/{made}/plans" in plan_folders(config.output_dir)
    with pytest.raises(ConfigError, match=r"takes 36\.22"):
        check_memory(config)


@pytest.mark.parametrize("model", ["mistral7b", "gemma3_270m", "qwen05b", "tiny"])
def test_the_sizes_are_those_that_transformers_finds(model: str) -> None:
    config = composed(f"model={model}", "hw=v5e8")
    sizes, stages = sizes_of(config.model), resolve_stages(config)
    assert sizes is not None
    found = ShapesOfModel(config.model, seed=0).config
    assert programs_key(config, sizes, stages) == programs_key(config, found, stages)


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1e-5",
        "seed=3",
        "name=other",
        "curriculum=three_epochs",
        "trainer.max_stage_steps=7",
        "trainer.plan_check=off",
        "model.path=tpu_experiments/samples/nowhere",
        "hw.price.usd_per_chip_hour_on_demand=9",
        "sample.max_new_tokens=3",
    ],
)
def test_what_shapes_no_program_is_not_of_the_key(override: str) -> None:
    assert key_of("hw=v5e8", override) == key_of("hw=v5e8")


@pytest.mark.parametrize(
    "override",
    [
        "trainer.micro_batch_rows=1",
        "trainer.seq_len=64",
        "trainer.loss_chunk_tokens=null",
        "trainer.global_batch_rows=32",
        "curriculum.stages.chat.seq_len=64",
        "lora.r=4",
        "lora.targets=[q_proj]",
        "lora.dropout=0.1",
        "optim=adafactor",
        "optim.clip_norm=null",
        "model.remat=save_dots",
        "model.attention=eager",
        "model.stack=unrolled",
        "model.dtype=bfloat16",
        "model.arch.num_hidden_layers=5",
        "sharding=replicated",
        "hw=v6e8",
        "hw.parallel=spawn",
        "hw.device=cpu",
        "hw.chip.program_hbm_gib=1",
        "hw.libtpu_flags=[--xla_nonsense]",
        "sample.window=64",
        "sample.max_new_tokens=0",
    ],
)
def test_what_shapes_a_program_is_of_the_key(override: str) -> None:
    assert key_of("hw=v5e8", override) != key_of("hw=v5e8")


def test_the_check_is_not_of_a_run_s_identity() -> None:
    assert config_hash(composed("trainer.plan_check=off")) == config_hash(composed())


def test_a_gpu_is_checked_by_formulas():
    """What is resident is known for a GPU as well; the remedy is QLoRA's."""
    too_much = finding(composed("model=mistral7b", "data=ultrachat_ro", "hw=l4", "lora=none"))
    assert too_much is not None
    assert too_much.certainty == "known"
    assert "trained weights 26.98, optimizer state 53.96" in too_much.words
    rows = ("trainer.seq_len=4096", "trainer.micro_batch_rows=8", "trainer.global_batch_rows=8")
    large = finding(composed("model=mistral7b", "data=ultrachat_ro", "hw=l4", *rows))
    assert large is not None
    assert large.certainty == "estimated"
    assert "task=plan" not in large.words, "nothing compiles for a GPU here"
    dense = composed("model=llama31_8b", "data=ultrachat_ro", "hw=t4x2", "trainer.seq_len=512")
    refused = finding(dense)
    assert refused is not None
    assert refused.certainty == "known"
    assert "model.base=nf4" in refused.words
    assert finding(composed("experiment=mistral7b_guanaco_qlora", "hw=t4x2")) is None
