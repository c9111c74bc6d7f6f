"""The host's time of a training step of each shipped recipe at full depth, traced at every call and as a run does it.

    python -m tests.benchmarks.trace_time
    python -m tests.benchmarks.trace_time --recipes qwen05b_uk_law --profile     # where it goes, by cProfile

The step is traced on placeholders, as task=plan does: no weights, no device memory. The first trace also differentiates
the layer; a run pays it once, so the later ones count. `hand over` is what a run does with the graph before torch_xla
finds the compiled program: its inputs, and twice the hash over all of it. `text` is the HLO that a run keeps of its
first step. A call that is not traced cannot run 7B weights here; it is measured on a program that is run on the CPU
device, in the recipe's parallel mode, and has as many tensors of each kind as its step, of two numbers a chip. `mean`
is over the 50 steps after the first: those that trainer.trace_every_steps leaves untraced and those that are traced.
Seconds are of the calling thread's CPU, so that other work on the machine counts little.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PLANNED_SECONDS = {"gemma3_270m_chat": 1.300, "mistral7b_ro": 0.670, "qwen05b_uk_law": 0.267}
"""Device seconds of a step by task=plan, not calibrated (README, Recipes on their TPUs)."""
OVERRIDES = {"mistral7b_ro": ["lora=all_linear_r16", "model.remat=save_dots"]}
"""As planned there."""
NUM_STEPS = 50
COLUMNS = (
    "first trace s", "text s, MB", "later trace + hand over s", "of the step", "untraced call s",
    f"mean of {NUM_STEPS} steps s", "of the step",
)  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Tensors of a step."""

    held: int
    """Parameters and optimizer state, which it reads and writes."""
    frozen: int
    """Others that it reads, numbers that Python hands to it among them."""
    reported: int
    """What it returns beside new values of those held."""


def traced(recipe: str, overrides: list[str], *, repeats: int, profile: bool) -> dict[str, Any]:
    """Seconds of the first trace and of each later one, in this process."""
    os.environ["PJRT_DEVICE"] = "CPU"
    from tests.config.composing import composed
    from tpu_experiments.runtime.xla.tracing import TracingRuntime
    from tpu_experiments.tasks.plan.programs import planned_trainer, shape_of

    config = composed(f"experiment={recipe}", *OVERRIDES.get(recipe, ()), *overrides)
    runtime = TracingRuntime(config.hw, sharding=config.sharding)
    trainer = planned_trainer(config, runtime)
    trainer.build()
    shape = shape_of(trainer.inputs.stages[0], runtime=runtime)
    first, counts = seconds_of_step(trainer, shape)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    later = [seconds_of_step(trainer, shape)[0] for _ in range(repeats)]
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    medians = {key: statistics.median(each[key] for each in later) for key in later[0]}
    settings = {**asdict(counts), "every": config.trainer.trace_every_steps, "parallel": config.hw.parallel}
    given = json.dumps({**settings, "num_devices": config.hw.num_devices})
    command = [sys.executable, "-m", "tests.benchmarks.trace_time", "--untraced", given]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    untraced, num_traced = json.loads(done.stdout.splitlines()[-1])
    call = medians["trace"] + medians["hash"]
    mean = (num_traced * call + (NUM_STEPS - num_traced) * untraced) / NUM_STEPS
    tensors = f"{counts.step_tensors} + {counts.frozen} + {counts.reported}"
    return {"first": first["trace"], **medians, "call": call, "untraced": untraced, "mean": mean, "tensors": tensors}


def seconds_of_step(trainer: Any, shape: tuple[int, int, int]) -> tuple[dict[str, float], Counts]:
    """Seconds of tracing one step, of handing its graph over, and of printing it."""
    import torch_xla

    from tpu_experiments.runtime.xla.programs import hlo_of
    from tpu_experiments.tasks.plan.programs import batch_like, stepped

    batch = trainer.runtime.put(batch_like(shape, trainer=trainer), rows_dim=1)
    started = time.thread_time()
    out = stepped(trainer, batch)
    done = time.thread_time()
    tensors = outputs_of(out)
    hashing = time.thread_time()
    _, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node(tensors)
    for _ in range(2):
        torch_xla._XLAC._get_graph_hash(tensors)
    hashed = time.thread_time()
    text = hlo_of(tensors)
    printed = time.thread_time()
    num_held = len(trainer.step_tensors())
    counts = Counts(num_held, len(inputs) - num_held - len(batch), len(outputs_of(out[2])))
    seconds = {"trace": done - started, "hash": hashed - hashing, "text": printed - hashed}
    return seconds | {"megabytes": len(text) / 1e6}, counts


def untraced_seconds(
    *, held: int, frozen: int, reported: int, every: int, parallel: str, num_devices: int
) -> tuple[float, int]:
    """Median of a call that is not traced, and how many of NUM_STEPS calls after the first are traced."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices)}
    import torch

    from tests.config.composing import composed
    from tpu_experiments.runtime.xla.device import XlaRuntime

    hw = ("hw=cpu", f"hw.parallel={parallel}", f"hw.num_devices={num_devices}")
    config = composed(*hw, "model=tiny", "data=sample_text")
    runtime = XlaRuntime(config.hw, sharding=config.sharding, on_recompile="error", trace_every=every)
    shape = 2 * num_devices
    state = runtime.put({f"held_{index}": torch.ones(shape) for index in range(held)}, rows_dim=0)
    others = runtime.put({str(index): torch.full((shape,), 1 + index / 1000) for index in range(frozen)}, rows_dim=0)

    def step(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        total = torch.stack(list(others.values())).sum(0) + torch.stack(list(batch.values())).sum(0)
        total = total + torch.rand(shape, device=runtime.device)
        for tensor in state.values():
            tensor.copy_(tensor + total)
        return [total + 2 * index for index in range(reported)]

    program = runtime.program(step, name="train", held=lambda: state)
    names, seconds, traced = ("ids", "learn", "positions", "segments", "lr"), [], 0
    for index in range(NUM_STEPS + 1):
        runtime.seed(index)
        batch = runtime.put({name: torch.ones(shape) for name in names}, rows_dim=0)
        before, started = program.num_traced, time.thread_time()
        program(batch)
        passed = time.thread_time() - started
        if program.num_traced == before:
            seconds.append(passed)
        elif index > 0:
            traced += 1
    return statistics.median(seconds) if seconds else 0.0, traced


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
    parser.add_argument("--untraced", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.untraced:
        print(json.dumps(untraced_seconds(**json.loads(given.untraced))))
        return
    if given.child:
        print(json.dumps(traced(given.recipes[0], given.vary, repeats=given.repeats, profile=given.profile)))
        return
    print(f"| recipe | planned step s | tensors held + read + reported | {' | '.join(COLUMNS)} |")
    print("|---|---|---|" + "---|" * len(COLUMNS))
    for recipe in given.recipes:
        command = [sys.executable, "-m", "tests.benchmarks.trace_time", "--child", "--recipes", recipe]
        command += ["--repeats", str(given.repeats), *(["--profile"] if given.profile else []), "--vary", *given.vary]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
        found, planned = json.loads(done.stdout.splitlines()[-1]), PLANNED_SECONDS[recipe]
        print(
            f"| {recipe} | {planned:.3f} | {found['tensors']} | {found['first']:.2f} | {found['text']:.2f}, "
            f"{found['megabytes']:.1f} | {found['trace']:.3f} + {found['hash']:.3f} | {found['call'] / planned:.1%} | "
            f"{found['untraced']:.4f} | {found['mean']:.4f} | {found['mean'] / planned:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
