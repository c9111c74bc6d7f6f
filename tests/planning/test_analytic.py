"""Plans from formulas: on a machine without libtpu, side by side, the ladder, the search and its overlay."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.jobs import of_tiny_job
from tests.planning.commands import plan_fields, run_plan
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.overlay import with_overlay
from tpu_experiments.objectives.base import trained_flops
from tpu_experiments.planning.analytic import estimated_memory

pytestmark = pytest.mark.usefixtures("root_logger")
REPOSITORY = Path(__file__).parents[2]
MISTRAL = (
    "model=mistral7b",
    "data=ultrachat_ro",
    "trainer.seq_len=2048",
    "trainer.global_batch_rows=64",
    "trainer.loss_chunk_tokens=null",
    "model.attention=sdpa",
    "model.remat=none",
)
ALL_ROWS = "trainer.micro_batch_rows=8"
ANALYTIC = "task.method=analytic"
WITHOUT = """
import importlib.abc, runpy, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"libtpu", "torch_xla", "jax"}:
            raise ModuleNotFoundError(name)
import importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {"libtpu", "torch_xla", "jax"} else known(name)
sys.meta_path.insert(0, Hidden())
runpy.run_path("run.py", run_name="__main__")
"""


def without_libtpu(*overrides: str) -> subprocess.CompletedProcess[str]:
    """run.py where neither libtpu nor torch_xla nor jax can be imported."""
    command = [sys.executable, "-c", WITHOUT, "task=plan", "~local", *of_tiny_job(overrides)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_without_libtpu_there_is_a_plan_and_it_is_called_analytic(tmp_path: Path) -> None:
    done = without_libtpu("hw=v6e1", f"output_dir={tmp_path}", "name=p")
    assert done.returncode == 0, done.stderr[-3000:]
    fields = plan_fields(tmp_path, "p")
    assert fields["method"] == fields["hbm_gib_per_chip"]["source"] == "analytic"
    assert fields["num_programs"] == 3
    assert fields["compile_seconds"] is None
    assert 0 < fields["mfu"] < 0.1  # a tiny model moves bytes
    assert fields["hours"] > 0
    assert "nothing was compiled (libtpu is not installed)" in done.stdout


def test_the_compiler_asked_for_without_libtpu_is_one_sentence(tmp_path: Path) -> None:
    done = without_libtpu("hw=v6e1", f"output_dir={tmp_path}", "task.method=compiled")
    assert done.returncode == 2
    assert done.stderr.startswith("error: task.method=compiled; libtpu, which holds the TPU's compiler, is not inst")
    assert len(done.stderr.splitlines()) == 1


def test_machines_are_side_by_side_and_gpus_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_plan(ANALYTIC, "hw=v6e1", "task.compare=[v5e8,colab]", f"output_dir={tmp_path}", "name=p")
    rows = {row["hw"]: row for row in plan_fields(tmp_path, "p")["comparisons"]}
    assert set(rows) == {"v5e8", "colab", "t4x2", "a100"}
    assert rows["t4x2"]["method"] == rows["a100"]["method"] == "datasheet"
    assert rows["t4x2"]["step_seconds"] == pytest.approx(rows["a100"]["step_seconds"] * 312 / 130)
    assert rows["colab"]["step_seconds"] == plan_fields(tmp_path, "p_colab")["estimated_step_seconds"]
    last = capsys.readouterr().out.split("  beside")[-6:]
    assert [line.split()[0] for line in last] == ["hw", "v6e1", "colab", "v5e8", "t4x2", "a100"]
    run_plan(ANALYTIC, "hw=v6e4", f"output_dir={tmp_path}", "name=q", "lora.r=4")
    assert [row["hw"] for row in plan_fields(tmp_path, "q")["comparisons"]] == ["t4x2", "a100"], "another job"


@pytest.mark.parametrize("hw", ["t4", "l4", "rtx4090", "a100", "h100"])
def test_gpus_are_planned_from_their_datasheets(hw: str, tmp_path: Path) -> None:
    run_plan("hw=" + hw, "task.method=auto", f"output_dir={tmp_path}", "name=p")
    fields = plan_fields(tmp_path, "p")
    chip = composed(f"hw={hw}").hw.chip
    assert chip is not None
    assert (fields["method"], fields["fits"], fields["versions"].get("topology")) == ("analytic", True, None)
    limit = chip.program_hbm_gib or chip.hbm_gib
    assert fields["hbm_gib_per_chip"]["limit"] == limit
    assert fields["usd"]["on_demand"] > 0
    assert "nothing was compiled (the compiler is that of TPUs)" in " ".join(fields["notes"])
    beside = [row["hw"] for row in fields["comparisons"]]
    assert beside == [name for name in ("t4x2", "a100") if name != hw]


def test_a_gpu_is_not_compiled_for_and_none_without_a_datasheet_planned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hw=l4 with task\.method=compiled; the compiler is that of TPUs"):
        run_plan("hw=l4", "task.method=compiled", f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"hw=gpu; task=plan .* names neither topology nor chip; choose one"):
        run_plan("hw=gpu", f"output_dir={tmp_path}")
    assert not list(tmp_path.iterdir())


def test_machines_that_cannot_be_planned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hw=v7; there is no conf/hw/v7\.yaml"):
        run_plan(ANALYTIC, "hw=v6e1", "task.compare=[v7]", f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"hw=cpu; task=plan compiles for a TPU"):
        run_plan(ANALYTIC, "hw=v6e1", "task.compare=[cpu]", f"output_dir={tmp_path}")
    few = r"hw.num_devices=4; hw.topology=v6e:1x1 has 1; give the topology of as many chips, or hw.num_devices=1"
    with pytest.raises(ConfigError, match=few):
        run_plan(ANALYTIC, "hw=v6e1", "hw.num_devices=4", "hw.parallel=spmd", f"output_dir={tmp_path}")
    assert not list(tmp_path.iterdir())


def test_the_ladder_stands_on_the_largest_micro_batch_that_fits(tmp_path: Path) -> None:
    run_plan(ANALYTIC, *MISTRAL, ALL_ROWS, "hw=v6e8", "task.explore=ladder", f"output_dir={tmp_path}", "name=p")
    fields = plan_fields(tmp_path, "p")
    assert fields["fits"]
    assert fields["micro_batch"] == 1
    rungs = {rung["micro_batch"]: rung for rung in fields["micro_batch_ladder"]}
    assert {micro: rung["fits"] for micro, rung in rungs.items()} == {1: True, 2: False, 8: False}
    assert rungs[2]["predicted_gib"] == pytest.approx(rungs[2]["total_gib"], rel=0.05)
    assert fields["notes"][0].startswith("micro-batch: the largest that fits is 1 rows per chip; the head-room of 8")
    assert "0 steps" in fields["notes"][0]


def test_the_search_prunes_judges_and_writes_an_overlay_that_training_takes(tmp_path: Path) -> None:
    settings = ("hw=v6e8", "sharding=replicated", f"output_dir={tmp_path}", "name=p")
    axes = (
        "task.search.axes={trainer.micro_batch_rows:[1,8,16],sharding:[fsdp,replicated],model.remat:[],model.stack:[]}"
    )
    run_plan(ANALYTIC, *MISTRAL, ALL_ROWS, *settings, "task.explore=search", axes)
    tried = {" ".join(each["overrides"]): each["outcome"] for each in plan_fields(tmp_path, "p")["search"]}
    assert tried == {
        "trainer.micro_batch_rows=1 sharding=fsdp": "fits",
        "trainer.micro_batch_rows=1 sharding=replicated": "too large",
        "": "too large",
        "trainer.micro_batch_rows=8 sharding=fsdp": "pruned",
        "trainer.micro_batch_rows=8 sharding=replicated": "pruned",
        "trainer.micro_batch_rows=16 sharding=fsdp": "refused",
        "trainer.micro_batch_rows=16 sharding=replicated": "refused",
    }
    best = tmp_path / "plans" / "p" / "best.yaml"
    arguments = with_overlay([*MISTRAL, f"+plan={best}", "hw=v6e8"], text=best.read_text(), file=str(best))
    config = composed(*arguments)
    assert (config.trainer.micro_batch_rows, config.sharding.name) == (1, "fsdp")
    own = with_overlay(["trainer.micro_batch_rows=4", f"+plan={best}"], text=best.read_text(), file=str(best))
    assert own == ["sharding=fsdp", "trainer.micro_batch_rows=4"], "the command line wins"


@pytest.mark.slow
def test_a_model_too_large_for_every_setting_is_shown_the_machine_that_holds_it(tmp_path: Path) -> None:
    run_plan(ANALYTIC, *MISTRAL, "hw=v5e8", "sharding=replicated", f"output_dir={tmp_path}", "name=p")
    none, larger = plan_fields(tmp_path, "p")["does_not_fit"]["remedies"]
    assert none.startswith(
        "no trainer.micro_batch_rows, sharding, model.remat or half of trainer.seq_len fits on hw=v5e8: the least"
    )
    assert larger.startswith("hw=v4-8 trainer.micro_batch_rows=1, the smallest machine of conf/hw")
    layers = "model.arch.num_hidden_layers=3000"
    run_plan(ANALYTIC, *MISTRAL, "hw=v5e8", layers, f"output_dir={tmp_path}", "name=q")
    remedies = plan_fields(tmp_path, "q")["does_not_fit"]["remedies"]
    assert remedies[-1] == "no machine of conf/hw holds it with one row per chip: a smaller model or shorter rows"


def test_whole_logits_that_do_not_fit_are_first_of_all_to_be_cut(tmp_path: Path) -> None:
    whole = ("experiment=gemma3_270m_chat", "trainer.micro_batch_rows=64", "trainer.loss_chunk_tokens=null")
    run_plan(ANALYTIC, *whole, f"output_dir={tmp_path}", "name=p")
    chunks, smaller, *_ = plan_fields(tmp_path, "p")["does_not_fit"]["remedies"]
    assert chunks.startswith("trainer.loss_chunk_tokens=2048 (estimated ")
    assert smaller.startswith("trainer.micro_batch_rows=")


def test_only_folded_layers_are_computed_again() -> None:
    config = composed("hw=v6e1", "model.remat=layer_inputs")
    unrolled = composed("hw=v6e1", "model.remat=layer_inputs", "model.stack=unrolled")
    whole = composed("hw=v6e1", "model.remat=none")
    again, once, saved = (trained_flops(each, each.model.arch, seq_len=128) for each in (config, unrolled, whole))
    assert once == saved
    assert once.recomputation == 0 < again.recomputation
    geometry = resolve_stages(config)[0].geometry
    needs = [estimated_memory(each, each.model.arch, geometry=geometry) for each in (config, unrolled, whole)]
    assert needs[1] == needs[2]
    assert needs[0].total < needs[1].total


def test_the_kernel_of_the_gated_delta_rule_keeps_less_than_plain_operations() -> None:
    """The compiler gives 4.03 GiB with the kernel, 6.02 without (tests/benchmarks/LOG.md)."""
    job = ("model=qwen35_08b", "data=ultrachat_ro", "hw=v6e1", "tuned=off", "task=plan")
    short = ("trainer.seq_len=2000", "trainer.global_batch_rows=32", "trainer.micro_batch_rows=4")
    kernel, plain = (
        estimated_memory(each, each.model.arch, geometry=resolve_stages(each)[0].geometry).total
        for each in (composed(*job), composed(*job, *short))
    )
    assert 0.75 * 4.03 < kernel < 1.6 * 4.03
    assert 0.75 * 6.02 < plain < 1.6 * 6.02
