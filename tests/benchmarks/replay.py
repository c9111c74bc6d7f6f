"""Steps that are all traced against steps that are mostly replayed, by the clock, on torch_xla's CPU device.

    python -m tests.benchmarks.replay

A TPU computes a step while Python traces the next. The CPU device does so only where no buffer is donated: its client
holds the thread that releases a donated buffer until the computation that took it is done (`CommonPjRtBuffer::
ReleaseBuffer`, torch_xla 2.9). So the traced steps are measured with XLA_ENABLE_PARAM_ALIASING=0, which stands in for
the TPU, and with donated buffers, as a run on the CPU device has them. A replayed step, whose graph donates, is the
device's own time. XLA computes on one thread. The rows make the device take about as long against its trace as a
recipe's step on its TPU does: folded layers trace for 8 to 53 % of a step, unrolled ones for 240 % (trace_time.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS, NUM_WARMUP = 24, 5
CASES = {
    "folded, long step": ("scanned", 8, 24),
    "folded, short step": ("scanned", 8, 4),
    "unrolled, long step": ("unrolled", 8, 24),
    "unrolled, short step": ("unrolled", 8, 2),
}
"""Stack, layers, rows of 128 tokens."""
WAYS = {
    "traced beside the device": (1, "0"),
    "traced, waits for the device": (1, "0"),
    "traced, donated": (1, "1"),
    "replayed": (200, "1"),
}
"""Interval of traces, XLA_ENABLE_PARAM_ALIASING."""


def seconds_of(way: str, *, stack: str, layers: int, rows: int) -> tuple[float, float]:
    """Return median seconds of a step by the clock, and of them those in which Python traces."""
    import torch_xla.core.xla_model as xm

    from tests.config.composing import composed
    from tests.training.tiny import Run, random_batch
    from tpu_experiments.runtime.xla.device import XlaRuntime

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers}
    config = composed(
        "model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", f"model.stack={stack}",
        *(f"model.tiny_arch.{name}={size}" for name, size in sizes.items()),
    )  # fmt: skip
    runtime = XlaRuntime(config.hw, sharding=config.sharding, on_recompile="error", trace_every=WAYS[way][0])
    run = Run(config, runtime)
    batches = [runtime.put(random_batch(i, rows=rows, seq_len=128), rows_dim=1) for i in range(NUM_STEPS + NUM_WARMUP)]
    for batch in batches[:NUM_WARMUP]:
        run.program(batch)
    runtime.wait()
    traced, started = runtime.counters().trace_seconds, time.perf_counter()
    for batch in batches[NUM_WARMUP:]:
        if way == "traced, waits for the device":
            xm.wait_device_ops()
        run.program(batch)
    runtime.wait()
    seconds = time.perf_counter() - started
    return seconds / NUM_STEPS, (runtime.counters().trace_seconds - traced) / NUM_STEPS


def measured(way: str, case: str) -> tuple[float, float]:
    """Return the same of a process of its own."""
    flags = "--xla_cpu_multi_thread_eigen=false"
    env = os.environ | {"PJRT_DEVICE": "CPU", "XLA_ENABLE_PARAM_ALIASING": WAYS[way][1], "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.benchmarks.replay", "--child", way, case]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True, check=True)
    step, trace = json.loads(done.stdout.splitlines()[-1])
    return float(step), float(trace)


def main() -> None:
    """Print the table, medians of `--repeats` processes each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        way, case = given.child
        stack, layers, rows = CASES[case]
        print(json.dumps(seconds_of(way, stack=stack, layers=layers, rows=rows)))
        return
    print(f"| case | trace ms | {' | '.join(f'{way}, ms' for way in WAYS)} |")
    print("|---|---|" + "---|" * len(WAYS))
    for case in given.cases:
        found = {way: [measured(way, case) for _ in range(given.repeats)] for way in WAYS}
        steps = [f"{1000 * statistics.median(step for step, _ in found[way]):.0f}" for way in WAYS]
        trace = 1000 * statistics.median(trace for _, trace in found["traced beside the device"])
        print(f"| {case} | {trace:.0f} | {' | '.join(steps)} |", flush=True)


if __name__ == "__main__":
    main()
