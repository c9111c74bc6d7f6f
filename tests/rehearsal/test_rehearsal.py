"""The product's own commands as a TPU VM would run them, through torch_xla's client of the C API (README.md here)."""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import private_names
from tests.rehearsal.machine import (
    OUT_OF_MEMORY_COMPILING,
    OUT_OF_MEMORY_EXECUTING,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Machine,
    NotHere,
    require_rehearsal,
)
from tests.rehearsal.programs import compiled, pairs
from tests.rehearsal.rehearse import Rehearsal, hardware, rehearse
from tests.tiers import only
from tests.training.runs import REPOSITORY, losses, records

pytestmark = [pytest.mark.xla, pytest.mark.timeout(1800)]
GOLDEN = REPOSITORY / "tests" / "golden" / "losses"
"""Losses of the recipes' smoke form on hw=cpu."""
RECIPES = {
    "default": "v6e1",
    "mistral7b_ro": "v6e8",
    "mistral7b_guanaco": "v6e8",
    "mistral7b_guanaco_qlora": "v6e1",
    "qwen05b_uk_law": "v5e8",
    "gemma3_270m_chat": "colab",
    "llama_mini_pretrain": "v5e8",
    "bitnet_pretrain": "v5e4",
    "lr_qat": "v6e4",
    "diffusion_llama": "v6e8",
    "xlstm_pretrain": "v6e1",
    "modernbert_mlm": "v6e8",
    "modernbert_classify": "v5e8",
    "eurobert_mlm": "v5e8",
    "deberta_v3_mlm": "v6e1",
    "deberta_v3_rtd": "v6e1",
}
IN_EVERY_RUN = ("default", "mistral7b_ro")
TINY = ("model=tiny", "data=[sample_text]", "trainer.max_stage_steps=2", "sample.max_new_tokens=0", "name=tiny")


@pytest.fixture(scope="module", autouse=True)
def here() -> None:
    """Skip where this machine cannot pretend to be a TPU VM."""
    try:
        require_rehearsal()
    except NotHere as error:
        pytest.skip(f"this machine cannot rehearse: {error}")


def smoke(recipe: str, *more: str) -> list[str]:
    """Return the words of a recipe's smoke form on its hardware."""
    words = [] if recipe == "default" else [f"experiment={recipe}"]
    return [*words, "debug=smoke", f"hw={RECIPES[recipe]}", *more]


def finished(done: Rehearsal, output_dir: Path) -> dict[str, Any]:
    """Return result.json of the one run, which ended well."""
    assert done.code == 0, done.output[-6000:]
    (path,) = output_dir.glob("*/result.json")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def golden(recipe: str) -> list[float]:
    """Return the losses of hw=cpu: of training, then held-out before and after."""
    return [float(line) for line in (GOLDEN / f"{recipe}.txt").read_text().split()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Rehearsal, Path]]:
    """Return a recipe's rehearsal and its `output_dir`; each is run once."""

    @functools.cache
    def run(recipe: str) -> tuple[Rehearsal, Path]:
        folder = tmp_path_factory.mktemp(recipe)
        return rehearse(smoke(recipe, f"output_dir={folder}"), folder=folder / "sent"), folder

    return run


@pytest.mark.parametrize("recipe", only(IN_EVERY_RUN, RECIPES))
def test_a_recipe_on_a_tpu_computes_what_it_does_on_a_cpu(recipe: str, ran: Any) -> None:
    done, folder = ran(recipe)
    result = finished(done, folder)
    found = [*losses(folder), result["eval_loss_before"], result["eval_loss"]]
    assert found == pytest.approx(golden(recipe), rel=1e-4)
    assert result["num_compiles"] == result["expected_programs"] == len(done.programs)
    assert result["compiles_after_warmup"] == 0
    assert done.executed > sum(stage["steps"] for stage in result["stages"])
    if hardware(smoke(recipe)).num_devices > 1:
        assert result["canary"]["loss"] < 1e-4
        assert result["canary"]["grad_norm"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_recipe_goes_on(recipe: str, tmp_path: Path) -> None:
    words = smoke(recipe, f"output_dir={tmp_path}", "checkpoint.every_steps=2")
    is_saved = lambda: any(tmp_path.glob("*/checkpoints/step_*2/COMMIT.json"))  # noqa: E731
    first = rehearse(words, folder=tmp_path / "killed", kill_when=is_saved)
    assert first.code == -9, first.output[-3000:]
    done = rehearse(words, folder=tmp_path / "sent")
    result = finished(done, tmp_path)
    assert "resumed at step" in done.output
    by_step = {record["step"]: record["train/loss"] for record in records(tmp_path) if "train/loss" in record}
    assert [*by_step.values(), result["eval_loss"]] == pytest.approx(
        golden(recipe)[:-2] + golden(recipe)[-1:], rel=1e-4
    )
    assert result["compiles_after_warmup"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_sends_is_what_its_plan_compiles(recipe: str, tmp_path: Path) -> None:
    """By the real libtpu: the same outputs, products, kernels, loops and sums over chips, and the same arguments."""
    from tests import forks

    words = smoke(recipe, f"output_dir={tmp_path}", "trainer.max_stage_steps=1", "name=planned")
    done = rehearse(words, folder=tmp_path / "sent")
    finished(done, tmp_path)
    planned = forks.run(["run.py", *words, "task=plan"])
    assert planned.returncode == 0, planned.stdout + planned.stderr
    (plan,) = tmp_path.glob("plans/*/plan.json")
    flags = json.loads(plan.read_text())["libtpu_flags"]
    assert {one.flags for one in done.programs} == {" ".join(flags)}
    found = pairs(done.programs, plan=tmp_path, hw=hardware(words))
    assert found
    wrong = {pair.name: pair.differences() for pair in found if pair.differences()}
    assert not wrong
    assert all(pair.total_difference < 0.15 for pair in found), [pair.total_difference for pair in found]


def test_libtpu_compiles_what_a_run_sends(ran: Any) -> None:
    """For eight chips, with kernels and memory that nothing writes, and the run's own options and flags."""
    done, folder = ran("mistral7b_ro")
    finished(done, folder)
    train = max(done.programs, key=lambda sent: sent.program.stat().st_size)
    assert train.has_tpu_calls
    assert "--xla_tpu_enable_flash_attention=false" in train.flags
    made = compiled(train, hw=hardware(["hw=v6e8"]))
    assert made.memory["temporaries"] > 0
    kinds = Counter(name.split()[0] for name in made.operations.elements())
    assert kinds["custom-call"] >= 2, "attention forward and backward"
    assert kinds["all-reduce"] or kinds["all-reduce-start"]


FAILURES = {
    "compile": ("compile 2", RESOURCE_EXHAUSTED, OUT_OF_MEMORY_COMPILING),
    "execute": ("execute 5", RESOURCE_EXHAUSTED, OUT_OF_MEMORY_EXECUTING),
}


@pytest.mark.parametrize("kind", only(["compile"], FAILURES))
def test_out_of_memory_is_a_sentence_with_smaller_settings(kind: str, tmp_path: Path) -> None:
    fail, code, text = FAILURES[kind]
    variables = {"REHEARSAL_FAIL": fail, "REHEARSAL_FAIL_CODE": str(code), "REHEARSAL_FAIL_TEXT": text}
    words = ["hw=v6e1", *TINY, f"output_dir={tmp_path}"]
    done = rehearse(words, folder=tmp_path / "sent", variables=variables)
    assert done.code == 2, done.output[-3000:]
    assert re.search(r"hw=v6e1; the memory of the device .*trainer\.micro_batch_rows", done.error), done.error
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_a_tpu_that_another_process_holds_is_named(tmp_path: Path) -> None:
    """Where its node does not show it: in another container's process namespace."""
    text = "The TPU is already in use by process with pid 77. Not attempting to load libtpu.so in this process."
    held = {"REHEARSAL_FAIL": "client 1", "REHEARSAL_FAIL_CODE": str(UNAVAILABLE), "REHEARSAL_FAIL_TEXT": text}
    done = rehearse(["hw=v6e1", *TINY, f"output_dir={tmp_path}"], folder=tmp_path / "sent", variables=held)
    assert done.code == 2, done.output[-3000:]
    assert done.error.startswith("error: hw=v6e1; the TPU is in use by process 77; "), done.output[-3000:]


@pytest.mark.slow
def test_a_chip_that_is_lost_ends_the_run_in_a_sentence_and_it_goes_on(tmp_path: Path) -> None:
    words = ["hw=v6e1", *TINY, "trainer.max_stage_steps=8", "checkpoint.every_steps=2", f"output_dir={tmp_path}"]
    text = "Device is unavailable: the TPU is in a bad state"
    gone = {"REHEARSAL_FAIL": "gone 12", "REHEARSAL_FAIL_CODE": str(UNAVAILABLE), "REHEARSAL_FAIL_TEXT": text}
    done = rehearse(words, folder=tmp_path / "gone", variables=gone)
    assert done.code == 75, done.output[-3000:]  # what started it starts it again
    assert done.error.startswith("error: hw=v6e1; "), done.output[-3000:]
    finished(rehearse(words, folder=tmp_path / "sent"), tmp_path)


@pytest.mark.slow
def test_missing_memory_statistics_are_left_out(tmp_path: Path) -> None:
    words = ["hw=v6e1", *TINY, f"output_dir={tmp_path}"]
    done = rehearse(words, folder=tmp_path / "sent", machine=Machine("v6e", 1, 0))
    assert finished(done, tmp_path)["peak_device_memory_gib"] is None
    assert done.output.count("no memory statistics") == 1
    assert not any("perf/hbm_gib" in record for record in records(tmp_path))


VARIANTS = {
    "replay": ("v6e1", "trainer.trace_every_steps=200", "trainer.max_stage_steps=8"),
    "unrolled": ("v6e8", "model.stack=unrolled"),
    "layer_inputs": ("v6e1", "model.remat=layer_inputs"),
    "offload": ("v6e1", "model.remat=offload"),
    "int8": ("v6e1", "model.base=int8"),
    "nf4": ("v6e1", "model.base=nf4"),
    "fsdp": ("v6e8", "sharding=fsdp"),
    "hsdp": ("v6e8", "sharding=hsdp"),
    "fsdp_tensor": ("v6e8", "sharding=fsdp_tensor"),
    "full": ("v5e8", "lora=none", "sharding=fsdp"),
    "bfloat16": ("v5e1", "model.dtype=bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", ["mistral7b", "gemma3_270m", "qwen05b"])
def test_a_variant_on_a_tpu_computes_what_it_does_on_a_cpu(variant: str, model: str, tmp_path: Path) -> None:
    from tests.training import runs

    hw, *more = VARIANTS[variant]
    words = [f"model={model}", "data=[sample_text]", "debug=smoke", "sample.max_new_tokens=0", *more]
    if variant == "fsdp_tensor":
        words.append("lora.dropout=0")
    done = rehearse([*words, f"hw={hw}", f"output_dir={tmp_path / 'tpu'}"], folder=tmp_path / "sent")
    result = finished(done, tmp_path / "tpu")
    chips = hardware([*words, f"hw={hw}"]).num_devices
    spmd = ("hw.parallel=spmd", f"hw.num_devices={chips}") if chips > 1 else ()
    runs.finished(*words, "hw=cpu", *spmd, output_dir=tmp_path / "cpu", as_typed=True)
    assert losses(tmp_path / "tpu") == pytest.approx(
        losses(tmp_path / "cpu"), abs=2e-3 if "bfloat" in variant else 2e-4
    )
    assert result["compiles_after_warmup"] == 0


@pytest.mark.slow
def test_what_follows_a_run_works_on_its_machine(tmp_path: Path) -> None:
    """The commands that a run prints at its end, doctor, and a resume check, on eight chips."""
    words = smoke("mistral7b_ro", f"output_dir={tmp_path}", "name=followed")
    done = rehearse(words, folder=tmp_path / "sent")
    finished(done, tmp_path)
    eight = Machine.of(hardware(["hw=v6e8"]))
    printed = re.findall(r"^  python run\.py (task=.*?)(?:   #.*)?$", done.output, re.MULTILINE)
    assert [line.split()[0] for line in printed] == ["task=generate", "task=evaluate", "task=export"]
    for line in printed:
        asked = [*line.split(), *(["task.prompt=Ce este?"] if "generate" in line else [])]
        again = rehearse(asked, folder=tmp_path / asked[0], machine=eight)
        assert again.code == 0, f"{line}\n{again.output[-3000:]}"
    for task in ("doctor", "resume_check"):
        again = rehearse([*words, f"task={task}", f"name={task}"], folder=tmp_path / task, machine=eight)
        assert again.code == 0, again.output[-3000:]


@pytest.mark.slow
def test_a_sweep_has_a_chip_for_each_point_and_a_pack_one_program(tmp_path: Path) -> None:
    eight = Machine.of(hardware(["hw=v6e8"]))
    words = ["hw=v6e1", *TINY, f"output_dir={tmp_path}"]
    many = ["-m", *words, "lora.r=4,8", "sweeping.points_at_once=2"]
    done = rehearse(many, folder=tmp_path / "points", machine=eight)
    assert done.code == 0, done.output[-3000:]
    assert len([one for one in done.counts.values() if one["executed"]]) == 2
    packed = ["-m", *words, "name=packed", "lora.r=4,8", "sweeping.pack=2"]
    done = rehearse(packed, folder=tmp_path / "pack")
    assert done.code == 0, done.output[-3000:]
    assert len(list(tmp_path.glob("sweeps/*/*/result.json"))) == 4


def test_every_private_name_is_listed() -> None:
    listed = private_names.RAN | private_names.DID_NOT_RUN.keys()
    assert private_names.used().keys() == listed


@pytest.mark.slow
def test_private_names_run_through_the_client(tmp_path: Path) -> None:
    """One chip and eight, all weights in parts, steps that are replayed, and a checkpoint."""
    common = ["debug=smoke", "experiment=mistral7b_ro", "trainer.trace_every_steps=200", f"output_dir={tmp_path}"]
    for words in (["hw=v6e1", "name=one"], ["hw=v6e8", "lora=none", "sharding=fsdp", "name=eight"]):
        done = rehearse([*common, *words], folder=tmp_path / "sent")
        assert done.code == 0, done.output[-3000:]
    called = {name for path in (tmp_path / "sent").glob("*.names") for name in path.read_text().split()}
    assert private_names.RAN - called == set()
