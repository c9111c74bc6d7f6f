"""What the host needs to trace the training step of each shipped recipe at full depth, beside the planned step.

    python -m tests.benchmarks.trace_time
    python -m tests.benchmarks.trace_time --recipes qwen05b_uk_law --profile     # where it goes, by cProfile

The step is traced on placeholders, as task=plan does: no weights, no device memory. The first trace also differentiates
the layer; a run pays it once, so the later ones count. `hand over` is what torch_xla does with the graph before it
finds the compiled program: here the hash over all of it. `text` is the HLO that a run keeps of its first step. Seconds
are of the tracing thread's CPU, so that other work on the machine counts little.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PLANNED_SECONDS = {"gemma3_270m_chat": 1.798, "mistral7b_ro": 1.429, "qwen05b_uk_law": 0.460}
"""Device seconds of a step by task=plan, not calibrated (README, Recipes on their TPUs)."""


def traced(recipe: str, overrides: list[str], *, repeats: int, profile: bool) -> dict[str, Any]:
    """Seconds of the first trace and of each later one, in this process."""
    os.environ["PJRT_DEVICE"] = "CPU"
    from tests.config.composing import composed
    from tpu_experiments.planning.trace import TracingRuntime
    from tpu_experiments.tasks.plan.programs import planned_trainer, shape_of

    config = composed(f"experiment={recipe}", *overrides)
    runtime = TracingRuntime(config.hw, sharding=config.sharding)
    trainer = planned_trainer(config, runtime)
    trainer.build()
    shape = shape_of(trainer.inputs.stages[0], runtime=runtime)
    first = seconds_of_step(trainer, shape)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    later = [seconds_of_step(trainer, shape) for _ in range(repeats)]
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    medians = {key: statistics.median(each[key] for each in later) for key in later[0]}
    return {"recipe": recipe, "first": first["trace"], **medians, "repeats": repeats}


def seconds_of_step(trainer: Any, shape: tuple[int, int, int]) -> dict[str, float]:
    """Seconds of tracing one step, of hashing its graph, and of printing it."""
    import torch
    import torch_xla

    from tpu_experiments.runtime.xla_programs import hlo_of
    from tpu_experiments.tasks.plan.programs import rows_like, stepped

    batch = trainer.runtime.put(rows_like(shape) | {"lr": torch.empty(1, device="meta")}, rows_dim=1)
    trainer.runtime.seed(1)
    started = time.thread_time()
    out = stepped(trainer, batch)
    done = time.thread_time()
    tensors = outputs_of(out)
    hashing = time.thread_time()
    torch_xla._XLAC._get_graph_hash(tensors)
    hashed = time.thread_time()
    text = hlo_of(tensors)
    printed = time.thread_time()
    return {"trace": done - started, "hash": hashed - hashing, "text": printed - hashed, "megabytes": len(text) / 1e6}


def outputs_of(out: Any) -> list[Any]:
    """Every tensor of a nested result."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def main() -> None:
    """Print the table; each recipe in a process of its own, since torch_xla takes its mode once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=sorted(PLANNED_SECONDS), choices=sorted(PLANNED_SECONDS))
    parser.add_argument("--vary", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(traced(given.recipes[0], given.vary, repeats=given.repeats, profile=given.profile)))
        return
    print("| recipe | planned step s | first trace s | later trace s | hand over s | of the step | text s, MB |")
    print("|---|---|---|---|---|---|---|")
    for recipe in given.recipes:
        command = [sys.executable, "-m", "tests.benchmarks.trace_time", "--child", "--recipes", recipe]
        command += ["--repeats", str(given.repeats), *(["--profile"] if given.profile else []), "--vary", *given.vary]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
        found, planned = json.loads(done.stdout.splitlines()[-1]), PLANNED_SECONDS[recipe]
        share = 100 * (found["trace"] + found["hash"]) / planned
        print(
            f"| {recipe} | {planned:.3f} | {found['first']:.2f} | {found['trace']:.3f} | {found['hash']:.3f} | "
            f"{share:.1f} % | {found['text']:.2f}, {found['megabytes']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
