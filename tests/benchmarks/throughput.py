"""Training on this machine's CPU: ours, PEFT in a plain eager loop, and the plain torch_xla loop of the seeds.

    python tests/benchmarks/throughput.py [--layers 8] [--steps 30] [--threads 2] [--cases peft xla]

One model, batch and number of cores; every case is a process of its own. conf/model/tiny with random weights and as
many layers as asked for, LoRA r=16 on seven projections, 16 rows of 128 tokens, AdamW, float32. The first 5 steps
(compilation, caches) are not timed; then the median over blocks of 5 steps counts, so that other work on the machine
disturbs less; CPU time, of all cores together, is disturbed least. The seeds' loop is PEFT's model on the XLA device,
every layer traced at every step, `torch_xla.sync()` and `loss.item()` after each; it gives transformers no mask, with
which it would read the mask on the host besides.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
WARM_UP_STEPS = 5
BLOCK_STEPS = 5
ROWS, SEQ_LEN = 16, 128
CASES = {
    "peft": "PEFT, plain loop, eager CPU",
    "seeds": "PEFT, the seeds' loop, torch_xla CPU",
    "eager": "tpu_experiments, eager CPU",
    "xla": "tpu_experiments, torch_xla CPU",
}
COLUMNS = (
    "case", "tokens/s", "ms per step", "CPU ms per step", "start to first loss, s", "peak MiB", "programs", "last loss",
)  # fmt: skip
Step = Callable[[int], Any]
"""From the number of a batch to its loss, which may still be on its way."""


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config, for ours")
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    print(f"{platform.machine()}, {args.threads} cores, {args.layers} layers, {ROWS} x {SEQ_LEN}, {args.steps} steps")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for case in args.cases:
        print(row(CASES[case], run_case(case, args)), flush=True)


def run_case(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure one case in a child, bound to as many cores as it has threads."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: args.threads])
    command = ["taskset", "-c", cores, sys.executable, __file__, "--measure", case, "--layers", str(args.layers)]
    command += ["--steps", str(args.steps), "--threads", str(args.threads), "--set", *args.set]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(title: str, result: dict[str, float]) -> str:
    """One line of the table."""
    cells = [
        title,
        f"{ROWS * SEQ_LEN / result['step_seconds']:,.0f}",
        f"{1000 * result['step_seconds']:.0f}",
        f"{1000 * result['cpu_seconds']:.0f}",
        f"{result['first_seconds']:.1f}",
        f"{result['peak_mib']:,.0f}",
        f"{result['programs']:.0f}",
        f"{result['last_loss']:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Run one case in this process."""
    import torch

    torch.set_num_threads(args.threads)
    overrides = ("model.init=random", f"model.arch.num_hidden_layers={args.layers}")
    if case in ("eager", "xla"):
        step, wait = our_step(configuration(f"hw.runtime={case}", *overrides, *args.set))
    else:
        step, wait = peft_step(configuration(*overrides), device="xla" if case == "seeds" else "cpu")
    loss = step(0)
    wait()
    first_seconds = time.time() - psutil.Process().create_time()
    for index in range(1, WARM_UP_STEPS):
        step(index)
    wait()
    blocks, busy = [], []
    for first in range(WARM_UP_STEPS, WARM_UP_STEPS + args.steps, BLOCK_STEPS):
        started, used = time.perf_counter(), time.process_time()
        for index in range(first, first + BLOCK_STEPS):
            loss = step(index)
        wait()
        blocks.append((time.perf_counter() - started) / BLOCK_STEPS)
        busy.append((time.process_time() - used) / BLOCK_STEPS)
    return {
        "step_seconds": statistics.median(blocks),
        "cpu_seconds": statistics.median(busy),
        "first_seconds": first_seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "programs": compiled_programs(),
        "last_loss": float(loss.detach().cpu()) if isinstance(loss, torch.Tensor) else loss,
    }


def compiled_programs() -> int:
    """By torch_xla's own count; 0 where it was not used."""
    if "torch_xla" not in sys.modules:
        return 0
    import torch_xla.debug.metrics as met

    return int((met.metric_data("CompileTime") or (0,))[0])


def configuration(*overrides: str) -> Any:
    """The main job's config with this model."""
    from tests.config.composing import composed

    return composed("model=tiny", *overrides)


def host_batch(seed: int) -> dict[str, Any]:
    """Whole rows of random tokens, every one learnt."""
    import torch

    ids = torch.randint(5, 4096, (1, ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    positions = torch.arange(SEQ_LEN, dtype=torch.int32).expand(1, ROWS, SEQ_LEN).contiguous()
    ones = torch.ones_like(ids)
    return {"ids": ids, "learn": ones, "positions": positions, "segments": ones, "lr": torch.tensor([1e-3])}


def our_step(config: Any) -> tuple[Step, Callable[[], None]]:
    """The trainer's step on the config's runtime."""
    from tests.training.tiny import Run
    from tpu_experiments.runtime.processes.launch import make_runtime

    runtime = make_runtime(config)
    run = Run(config, runtime)
    return lambda seed: run.program(runtime.put(host_batch(seed), rows_dim=1)).loss, runtime.wait


def peft_step(config: Any, *, device: str) -> tuple[Step, Callable[[], None]]:
    """The same model in PEFT, in a loop as its users write it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tpu_experiments.models.huggingface import config_from_arch

    lora = config.lora
    torch.manual_seed(config.seed)
    base = AutoModelForCausalLM.from_config(config_from_arch(config.model.arch), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.targets)).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)

    def step(seed: int) -> Any:
        ids = host_batch(seed)["ids"][0].long().to(device)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cpu":
            return loss
        import torch_xla

        torch_xla.sync()
        return loss.item()

    return step, lambda: None


if __name__ == "__main__":
    main()
