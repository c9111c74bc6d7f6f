"""Training tokens/s of one model, batch and number of threads: our eager and xla runtimes, and PEFT in a plain loop.

    python tests/benchmarks/throughput.py [--steps 30] [--threads 2]

Every case is a process of its own; the first 5 steps (compilation, caches) are not timed. The model is conf/model/tiny,
LoRA r=16 on seven projections, 16 rows of 128 tokens, AdamW, float32.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WARM_UP_STEPS = 5
ROWS, SEQ_LEN = 16, 128
CASES = {
    "peft": "PEFT, plain loop, eager CPU",
    "eager": "tpu_experiments, eager CPU",
    "xla": "tpu_experiments, torch_xla CPU",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=CASES)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, steps=args.steps, threads=args.threads)))
        return
    print(f"{platform.machine()}, {args.threads} threads, {args.steps} steps of {ROWS} x {SEQ_LEN}")
    print("| case | tokens/s | ms per step | first step, s | last loss |\n|---|---|---|---|---|")
    for case, title in CASES.items():
        print(row(title, run_case(case, args)), flush=True)


def run_case(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure one case in a child, bound to as many cores as it has threads."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: args.threads])
    command = ["taskset", "-c", cores, sys.executable, __file__, "--case", case]
    command += ["--steps", str(args.steps), "--threads", str(args.threads)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(title: str, result: dict[str, float]) -> str:
    """One line of the table."""
    speed, step = f"{result['tokens_per_second']:,.0f}", f"{1000 * result['step_seconds']:.0f}"
    return f"| {title} | {speed} | {step} | {result['first_seconds']:.1f} | {result['last_loss']:.4f} |"


def measure(case: str, *, steps: int, threads: int) -> dict[str, float]:
    """Seconds of the first step and mean of the timed ones."""
    import torch

    torch.set_num_threads(threads)
    step, wait = {"peft": peft_step, "eager": our_step, "xla": our_step}[case](case)
    times = [time.perf_counter()]
    for index in range(WARM_UP_STEPS):
        step(index)
        if index == 0:
            wait()
            times.append(time.perf_counter())
    wait()
    started = time.perf_counter()
    for index in range(WARM_UP_STEPS, WARM_UP_STEPS + steps):
        loss = step(index)
    wait()
    seconds = (time.perf_counter() - started) / steps
    return {
        "tokens_per_second": ROWS * SEQ_LEN / seconds,
        "step_seconds": seconds,
        "first_seconds": times[1] - times[0],
        "last_loss": float(loss.detach().cpu()),
    }


def configuration(*overrides: str):
    from hydra import compose, initialize_config_dir

    from tpu_experiments.config.load import to_config
    from tpu_experiments.config.schema import register

    register()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return to_config(compose("config", overrides=["model=tiny", *overrides]))


def host_batch(seed: int):
    """Whole rows of random tokens, every one learnt."""
    import torch

    ids = torch.randint(5, 4096, (1, ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    positions = torch.arange(SEQ_LEN, dtype=torch.int32).expand(1, ROWS, SEQ_LEN).contiguous()
    ones = torch.ones_like(ids)
    return {"ids": ids, "learn": ones, "positions": positions, "segments": ones, "lr": torch.tensor([1e-3])}


def our_step(case: str):
    from tests.training.tiny import Run
    from tpu_experiments.runtime.launch import make_runtime

    config = configuration(f"hw.runtime={case}")
    runtime = make_runtime(config)
    run = Run(config, runtime)
    return lambda seed: run.program(runtime.put(host_batch(seed), rows_dim=1)).loss, runtime.wait


def peft_step(case: str):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = configuration()
    base = AutoModelForCausalLM.from_pretrained(REPOSITORY / config.model.path, dtype=torch.float32)
    lora = config.lora
    model = get_peft_model(base, LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.targets))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(seed: int):
        ids = host_batch(seed)["ids"][0].long()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, lambda: None


if __name__ == "__main__":
    main()
