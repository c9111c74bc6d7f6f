"""task=plan end to end: a model of one layer compiled for one v6e chip by the TPU's own compiler."""

import json
import math
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.config.composing import composed
from tests.jobs import of_tiny_job
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import flags_of
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.planning.hlo.parts import PARTS
from tpu_experiments.tasks.plan import environment_with_libtpu
from tpu_experiments.training.batches import RunInputs, expected_programs

REPOSITORY = Path(__file__).parents[2]
ONE_LAYER = ("hw=v6e1", "model.init=random", "model.arch.num_hidden_layers=1", "trainer.eval_every_steps=30")
ONE_LAYER += ("trainer.seq_len=128", "trainer.global_batch_rows=16")
SMALL = (*ONE_LAYER, "curriculum.stages.text.steps=60", "curriculum.stages.chat.steps=60")


def plan(folder: Path, *overrides: str, task: str = "plan") -> subprocess.CompletedProcess[str]:
    """run.py with `name=p` unless the overrides say otherwise."""
    flags = [override for override in overrides if override == "-m"]
    overrides = tuple(of_tiny_job([override for override in overrides if override != "-m"]))
    command = ["run.py", *flags, f"task={task}", "~local", f"output_dir={folder}", *overrides]
    command += [] if any(override.startswith("name=") for override in overrides) else ["name=p"]
    return forks.run(command)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("plan")
    done = plan(folder, *SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "plans" / "p" / "plan.json").read_text()), done.stdout


def test_the_tiny_model_fits_and_costs_something(planned: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, printed = planned
    hbm = found["hbm_gib_per_chip"]
    assert found["fits"]
    assert found["method"] == "compiled"
    config = composed(*SMALL, "task=plan")
    parameters = read_decoder(config.model.arch).parameters + 38_912
    # In float32, with two moments of the 38,912 of the adapters, and nothing written twice.
    assert 4 * (parameters + 2 * 38_912) / 2**30 < hbm["arguments"] < 0.01
    assert hbm["limit"] == 31.25
    assert 0 < hbm["outputs"] < 1e-5
    assert found["num_programs"] == expected_programs(RunInputs(None, {}, resolve_stages(config)), config) == 3
    assert [program["name"] for program in found["programs"]] == ["train", "eval", "sample"]
    assert all(program["compile_seconds"] > 0.5 for program in found["programs"])
    assert found["compile_seconds"] == pytest.approx(sum(program["compile_seconds"] for program in found["programs"]))
    train, evaluation, sample = (program["estimated_seconds"] for program in found["programs"])
    assert train > evaluation > sample > 0
    # Evaluations of 2 x 8 batches before, within and behind each stage of 60 steps; samples of 48 tokens with each and
    # at the end.
    assert found["run"]["seconds"]["evaluation"] == pytest.approx(5 * 2 * 8 * evaluation + 6 * 48 * sample)
    assert "no other is compiled later" in printed
    assert 0 < found["mfu"] < 1
    assert found["tokens_per_second_per_chip"] > 1000
    assert found["hours"] > 0
    assert found["usd"]["on_demand"] > found["usd"]["spot"] > 0
    assert found["versions"]["libtpu"] == "0.0.21"
    assert found["libtpu_flags"] == flags_of(composed("hw=v6e1").hw)
    assert "fits" in printed
    assert "estimate" in printed
    assert (folder / "plans" / "p" / "plan.svg").read_text().startswith("<svg")


def test_the_memory_of_a_plan_is_what_the_compiler_compares_with_the_chip(tmp_path: Path) -> None:
    """On a chip of a mebibyte less the same program does not fit, by the same number."""
    job = ("model=qwen05b", "model.size=tiny", "model.arch.num_hidden_layers=6", "model.arch.vocab_size=512")
    job += ("data=sample_text", "hw=v5e1", "trainer.seq_len=1024", "trainer.global_batch_rows=16", "tuned=off")
    limit, found = 15 * 1024, {}
    for name in ("whole", "small"):
        flag = f"hw.libtpu_flags=['--xla_tpu_max_hbm_size_mib={limit}']"
        done = forks.run(
            ["run.py", "task=plan", "task.programs=train", f"output_dir={tmp_path}", f"name={name}", *job, flag]
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = json.loads((tmp_path / "plans" / name / "plan.json").read_text())
        limit = math.ceil(1024 * found[name]["hbm_gib_per_chip"]["total"]) - 1
    whole, small = (found[name]["hbm_gib_per_chip"] for name in ("whole", "small"))
    assert (found["whole"]["fits"], found["small"]["fits"]) == (True, False)
    assert 1024 * whole["total"] > 12
    # Its report is rounded to 0.01 MiB, of which it has three.
    assert small["total"] == pytest.approx(whole["total"], abs=0.03 / 1024)
    assert found["small"]["does_not_fit"]["used_gib"] == pytest.approx(small["total"], abs=0.03 / 1024)


def test_the_parts_of_the_step_are_reported(planned: tuple[Path, dict[str, Any], str]) -> None:
    _, found, printed = planned
    parts = found["estimated_step_by_part"]
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(found["estimated_step_parts"]["uncalibrated_total"])
    assert all(parts[part] > 0 for part in ("attention", "projections", "adapters", "loss", "optimizer"))
    assert parts["collectives"] == 0, "one chip"
    assert f"by part, ms: attention {1000 * parts['attention']:,.1f}, projections" in printed
    assert parts["other"] < 0.5 * sum(parts.values())


@pytest.mark.slow
def test_the_pass_of_a_reference_is_compiled_and_counted(tmp_path: Path) -> None:
    pairs = ("objective=dpo", "data=stories_pairs_ro", "curriculum=single", "curriculum.stages.main.epochs=2")
    prepared = plan(tmp_path, *ONE_LAYER, *pairs, task="prepare")
    assert prepared.returncode == 0, prepared.stderr[-3000:]
    done = plan(tmp_path, *ONE_LAYER, *pairs)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "plans" / "p" / "plan.json").read_text())
    programs = {program["name"]: program for program in found["programs"]}
    assert list(programs)[:3] == ["train", "eval", "reference"]
    seconds = programs["reference"]["estimated_seconds"]
    assert 0 < seconds < programs["train"]["estimated_seconds"]
    # Every row of an epoch once: as many batches as half of the steps have micro-batches.
    batches = found["run"]["seconds"]["reference"] / seconds
    assert batches == pytest.approx(found["run"]["stages"][0]["steps"] / 2 * found["accumulation"])


@pytest.mark.slow
def test_answers_are_planned_beside_the_run(tmp_path: Path) -> None:
    answers = ("task.decode.rows=3", "task.decode.prompt_tokens=120", "task.decode.max_new_tokens=9")
    done = plan(tmp_path, *SMALL, *answers, "model.dtype=bfloat16")
    assert done.returncode == 0, done.stderr[-3000:]
    plan_of_run = json.loads((tmp_path / "plans" / "p" / "plan.json").read_text())
    found, arch = plan_of_run["decoding"], read_decoder(composed(*SMALL).model.arch)
    # Eight tokens after the first in one call: 128 slots of keys and of values, of one layer, in bf16.
    cache = 2 * 2 * 3 * 128 * arch.num_kv_heads * arch.head_dim / 2**30
    assert found["computed_tokens"] == 8
    assert cache <= found["classes"]["cache"] < 1.02 * cache
    weights = 2 * arch.parameters / 2**30
    assert found["classes"]["weights"] == pytest.approx(weights, rel=0.01)
    assert found["floor_seconds"] * composed("hw=v6e1").hw.chip.hbm_gb_per_second * 1e9 == pytest.approx(
        (weights + found["classes"]["cache"]) * 2**30, rel=0.01
    )
    assert found["token_seconds"] >= found["floor_seconds"] > 0
    assert found["beside_gib"] == pytest.approx(
        found["total_gib"] + plan_of_run["hbm_gib_per_chip"]["arguments"], rel=0.1
    )
    parts = found["merge_seconds"], found["prefill_seconds"], 8 * found["token_seconds"]
    assert min(parts) > 0
    assert found["seconds"] == pytest.approx(sum(parts))
    assert f"{1e3 * found['token_seconds']:.2f} ms a token" in done.stdout
    assert plan_of_run["num_programs"] == 3, "they are no programs of the run"


@pytest.mark.slow
def test_an_epoch_is_as_long_as_the_prepared_data(planned: tuple[Path, dict[str, Any], str]) -> None:
    folder, first, _ = planned
    compiled = sorted((folder / "plans" / "compiled").iterdir())
    settings = ("curriculum=three_epochs", "data=sample_text", f"prepare.folder={folder}/prepared", "seed=7")
    unknown = plan(folder, *ONE_LAYER, *settings, "data.sample_text.total_tokens=null")
    assert unknown.returncode == 0, unknown.stderr[-3000:]
    assert "data.sample_text is not prepared (task=prepare)" in unknown.stdout
    found = json.loads((folder / "plans" / "p" / "plan.json").read_text())
    assert found["hours"] is None
    assumed = plan(folder, *ONE_LAYER, *settings)
    assert "is assumed from data.<name>.total_tokens: data.sample_text is not prepared" in assumed.stdout
    found = json.loads((folder / "plans" / "p" / "plan.json").read_text())
    assert found["run"]["optimizer_steps"] == math.ceil(3 * 0.9 * 32_600 / 2048)
    assert found["estimated_cycles"] == first["estimated_cycles"]
    made = plan(folder, *settings, task="prepare")
    assert made.returncode == 0, made.stderr[-3000:]
    assert plan(folder, *ONE_LAYER, *settings).returncode == 0
    [manifest] = (folder / "prepared").glob("sample_text-rows-*/manifest.json")
    rows = json.loads(manifest.read_text())["splits"]["train"]["rows"]
    found = json.loads((folder / "plans" / "p" / "plan.json").read_text())
    assert found["run"]["optimizer_steps"] == -(-3 * rows // 16)
    assert found["hours"] > 0
    assert sorted((folder / "plans" / "compiled").iterdir()) == compiled, "what was compiled is remembered"


@pytest.mark.slow
def test_the_search_finds_the_largest_batch_that_a_small_chip_holds(
    planned: tuple[Path, dict[str, Any], str],
) -> None:
    """A limit between what 8 and 16 rows take, both by the real compiler; the second try compiles nothing."""
    folder, first, _ = planned
    limit = f"hw.chip.program_hbm_gib={0.9 * first['hbm_gib_per_chip']['total']:.6f}"
    axes = "task.search.axes={trainer.micro_batch_rows:[8,16],model.remat:[],model.stack:[]}"
    searched = plan(folder, *SMALL, "name=s", limit, axes, "task.explore=search", "task.search.prune_above=99")
    assert searched.returncode == 0, searched.stderr[-3000:]
    found = json.loads((folder / "plans" / "s" / "plan.json").read_text())
    outcomes = {" ".join(each["overrides"]): each["outcome"] for each in found["search"]}
    assert outcomes == {
        "trainer.micro_batch_rows=8": "fits",
        "trainer.micro_batch_rows=16": "too large",
        "": "too large",
    }
    assert found["fits"]
    assert (found["micro_batch"], found["accumulation"]) == (8, 2)
    best = folder / "plans" / "s" / "best.yaml"
    assert f"+plan={best}" in searched.stdout
    assert best.read_text().endswith("\ntrainer.micro_batch_rows: 8\n")
    compiled = sorted((folder / "plans" / "compiled").iterdir())
    again = plan(folder, *SMALL, "name=t", limit, "task.explore=ladder", f"+plan={best}")
    assert again.returncode == 0, again.stderr[-3000:]
    found = json.loads((folder / "plans" / "t" / "plan.json").read_text())
    assert {rung["micro_batch"]: rung["fits"] for rung in found["micro_batch_ladder"]} == {8: True, 16: False}
    assert sorted((folder / "plans" / "compiled").iterdir()) == compiled


@pytest.mark.slow
def test_the_search_compiles_no_more_rows_than_were_too_large(planned: tuple[Path, dict[str, Any], str]) -> None:
    """One layer is not folded, so that every model.remat is the same program, compiled once."""
    folder, first, _ = planned
    limit = f"hw.chip.program_hbm_gib={0.1 * first['hbm_gib_per_chip']['total']:.6f}"
    axes = "task.search.axes={trainer.micro_batch_rows:[8,16],model.remat:[none,layer_inputs],model.stack:[]}"
    settings = (
        "trainer.micro_batch_rows=8",
        "task.explore=search",
        "task.search.prune_above=99",
        "task.programs=train",
    )
    searched = plan(folder, *SMALL, "name=r", limit, axes, *settings)
    assert searched.returncode == 0, searched.stderr[-3000:]
    found = json.loads((folder / "plans" / "r" / "plan.json").read_text())
    assert {
        " ".join(each["overrides"]): (each["outcome"], each["reason"].partition(",")[0]) for each in found["search"]
    } == {
        "": ("too large", "compiled"),
        "trainer.micro_batch_rows=8 model.remat=none": ("too large", "compiled"),
        "trainer.micro_batch_rows=8 model.remat=layer_inputs": ("too large", "compiled"),
        "trainer.micro_batch_rows=16 model.remat=none": ("pruned", "8 rows were too large"),
        "trainer.micro_batch_rows=16 model.remat=layer_inputs": ("pruned", "8 rows were too large"),
    }
    assert not (folder / "plans" / "r" / "best.yaml").exists()


def test_training_is_refused_by_a_compiled_plan_that_does_not_fit(planned: tuple[Path, dict[str, Any], str]) -> None:
    folder, first, _ = planned
    limit = f"hw.chip.program_hbm_gib={0.9 * first['hbm_gib_per_chip']['total']:.6f}"
    assert plan(folder, *SMALL, "name=n", limit).returncode == 0
    before = sorted(folder.iterdir())
    refused = plan(folder, *SMALL, limit, task="train")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "error: hw=v6e1; the program train of this run was compiled for v6e:1x1 and takes "
    )
    assert f"({folder}/plans/n/plan.json, libtpu 0.0.21); nearest settings that fit: " in refused.stderr
    for other in ((limit, "lora.r=4"), ()):
        assert "error: hw=v6e1 asks for a TPU" in plan(folder, *SMALL, *other, task="train").stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_a_finished_run_is_held_against_its_plan(planned: tuple[Path, dict[str, Any], str]) -> None:
    """A plan for a v6e chip and a run on the CPU device: the figures are far apart, the bookkeeping is the same."""
    folder, *_ = planned
    settings = (*SMALL, "hw.device=cpu", "trainer.eval_every_steps=0", "trainer.max_eval_rows=16")
    assert plan(folder, *settings, "name=c").returncode == 0
    found = json.loads((folder / "plans" / "c" / "plan.json").read_text())
    done = plan(folder, *settings, "name=d", "trainer.max_stage_steps=3", "trainer.log_every_steps=2", task="train")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / "d" / "result.json").read_text())
    beside = result["plan"]
    assert (beside["source"], beside["file"]) == ("compiled", f"{folder}/plans/c/plan.json")
    step, speed, memory, compiling = (
        beside[name] for name in ("step_seconds", "tokens_per_second_per_chip", "hbm_gib", "compile_seconds")
    )
    assert step["planned"] == pytest.approx(found["estimated_step_seconds"])
    assert speed["planned"] == pytest.approx(found["tokens_per_second_per_chip"])
    # Six steps, as long as tokens_per_second says; that one does not count the padding.
    assert step["measured"] == pytest.approx(result["tokens"] / result["tokens_per_second"] / 6)
    assert speed["measured"] == pytest.approx(16 * 128 / step["measured"])
    assert step["ratio"] == pytest.approx(1 / speed["ratio"])
    assert compiling["planned"] == found["compile_seconds"]
    assert compiling["measured"] == result["seconds"]["compile"]
    assert memory["planned"] == found["hbm_gib_per_chip"]["arguments"]
    assert (memory["measured"], memory["ratio"]) == (None, None)
    assert memory["reason"] == "the device does not report its memory"
    assert f"{step['planned']:.3g} s a step (compiled), measured {step['measured']:.3g}" in done.stdout


@pytest.mark.slow
def test_a_sweep_compiles_nothing_that_is_compiled(planned: tuple[Path, dict[str, Any], str]) -> None:
    folder, *_ = planned
    compiled = sorted((folder / "plans" / "compiled").iterdir())
    done = plan(folder, "-m", *SMALL, "optim.lr=1e-4,1e-3", "name=rates")
    assert done.returncode == 0, done.stderr[-3000:]
    made = [file.parent.name for file in sorted(folder.glob("sweeps/rates/plans/*/plan.json"))]
    assert [name.rpartition(",")[2] for name in made] == ["optim.lr=0.0001", "optim.lr=0.001"]
    assert not list(folder.glob("sweeps/rates/plans/compiled"))
    assert sorted((folder / "plans" / "compiled").iterdir()) == compiled


@pytest.mark.slow
def test_a_sweep_over_machines_ends_with_all_of_them_side_by_side(tmp_path: Path) -> None:
    done = plan(tmp_path, "-m", "hw=v6e1,colab", "task.method=analytic")
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.rpartition("  plan ")[2].split("  beside")
    assert [line.split()[0] for line in last[1:]] == ["hw", "colab", "v6e1", "t4x2", "a100"]
    *_, sweep, titles, first, second, total, file = done.stdout.splitlines()
    assert sweep == "the whole sweep, 2 points; the points one after the other:"
    assert titles.split() == ["hw", "fits", "hours", "$", "on", "demand", "$", "spot"]
    hours = [float(line.split()[2]) for line in (first, second)]
    assert float(total.split()[1]) == pytest.approx(sum(hours), abs=0.011)
    assert Path(file.removeprefix("sweep: ")).name == "plan_total.md"


def test_an_unknown_topology_ends_with_exit_code_2(tmp_path: Path) -> None:
    done = plan(tmp_path, *SMALL, "hw.topology=v9e:1x1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: hw.topology=v9e:1x1; the TPU compiler has no such slice")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["task.libtpu=/nowhere"],
            "task.libtpu=/nowhere; it is no virtual environment, as it has no bin/python; launch/",
        ),
        (
            ["task.libtpu=.", "task.method=analytic"],
            "task.libtpu=. with task.method=analytic; formulas compile nothing",
        ),
    ],
)
def test_a_compiler_that_is_not_there_is_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    done = plan(tmp_path, *SMALL, *words)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("plans/*"))


def test_an_environment_without_the_package_cannot_compile(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    with pytest.raises(ConfigError, match=r"this program does not run in it \(ModuleNotFoundError"):
        environment_with_libtpu(str(tmp_path / "other"), method="compiled")
    (tmp_path / "other" / "bin" / "python").unlink()
    (tmp_path / "other" / "bin" / "python").write_text("")
    with pytest.raises(ConfigError, match=r"its Python does not start \(Permission denied\); launch/local\.sh"):
        environment_with_libtpu(str(tmp_path / "other"), method="compiled")


def test_hardware_without_a_topology_is_refused(tmp_path: Path) -> None:
    done = plan(tmp_path, "hw=cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: hw=cpu; task=plan compiles for a TPU")
    assert not list(tmp_path.iterdir())
