"""Write and print a plan next to those of other machines."""

from dataclasses import replace
from pathlib import Path

from tpu_experiments.config.commands import override_of, typed
from tpu_experiments.config.compose import machine
from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.planning.analytic import estimated_memory
from tpu_experiments.planning.chart import plan_chart_svg
from tpu_experiments.planning.compare import datasheet_comparison, saved_comparisons
from tpu_experiments.planning.plan import Comparison, Plan
from tpu_experiments.planning.report import plan_json, plan_markdown, plan_table
from tpu_experiments.planning.search import overlay_yaml, typed_words
from tpu_experiments.planning.stored_plans import PLAN_FILE, PLANS, compiled_folder
from tpu_experiments.runtime.processes.chips import tpu_present
from tpu_experiments.runtime.processes.env import compile_cache_folder
from tpu_experiments.runtime.tpu import planned
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.tasks.plan.formulas import arch_of

REFERENCE_HW = ("t4x2", "a100")
"""The UK-law recipe's comparison and the most commonly rented alternative; known from datasheets only."""


def publish(plan: Plan, *, config: Config) -> None:
    """Write plan.json, plan.md, plan.svg (and best.yaml of a search) and print the table."""
    everything = paths.join(config.output_dir, PLANS)
    folder = paths.join(everything, str(config.name))
    others = [row for name in REFERENCE_HW if name != plan.hw.name for row in reference(plan, name, config=config)]
    plan = replace(plan, comparisons=(*saved_comparisons(plan, folder=everything), *others))
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, "plan.svg"), plan_chart_svg(plan))
    paths.write_text_atomic(paths.join(folder, "plan.md"), plan_markdown(plan, chart="plan.svg"))
    paths.write_text_atomic(paths.join(folder, PLAN_FILE), strict_json.dumps(plan_json(plan), indent=1) + "\n")
    print(for_terminal(plan_table(plan)))
    print(f"plan: {folder}/plan.md")
    kept = kept_programs(plan, config=config)
    if kept:
        print(kept)
    overlay = overlay_yaml(plan)
    if overlay:
        paths.write_text_atomic(paths.join(folder, "best.yaml"), overlay)
        words = typed("task=train", override_of("+plan", f"{folder}/best.yaml"), *typed_words(plan))
        print(f"best: the same command with {words}")


def kept_programs(plan: Plan, *, config: Config) -> str:
    """Copy the plan's programs to hw.compile_cache, where a run by TorchTPU finds them; return a line that says so.

    The default folder is filled on a machine with a TPU alone.
    """
    folder = compile_cache_folder(config, process=0)
    if config.hw.runtime != "torchtpu" or folder is None or (config.hw.compile_cache == "auto" and not tpu_present()):
        return ""
    assert isinstance(config.task, PlanTaskConfig)
    compiled = Path(compiled_folder(config.task, output_dir=config.output_dir))
    places = [
        planned.keep(compiled / each.fingerprint, folder=Path(folder)) for each in plan.programs if each.fingerprint
    ]
    found = [place for place in places if place is not None]
    mib = sum(file.stat().st_size for place in found for file in place.iterdir()) / 2**20
    return f"programs: {len(found)} of {len(places)} compiled for the run, {mib:.0f} MiB in {folder}/{planned.PLANNED}"


def reference(plan: Plan, name: str, *, config: Config) -> list[Comparison]:
    """Estimate a machine of conf/hw from its datasheet; empty if the batch cannot be divided over it."""
    hw = machine(name)
    if plan.global_batch % hw.num_devices:
        return []
    there = replace(config, hw=hw)
    rows = plan.global_batch // hw.num_devices
    cut = Geometry(plan.global_batch, 1, rows, hw.num_devices, plan.seq_len)
    memory = estimated_memory(there, arch_of(config), geometry=cut)
    tokens = plan.global_batch * plan.seq_len
    return [datasheet_comparison(hw, flops=plan.flops, tokens_per_step=tokens, run=plan.run, fits=memory.headroom >= 0)]
