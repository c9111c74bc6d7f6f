"""Recipes at full size on one NVIDIA GPU, beside their plans: seconds a step, tokens/s and memory.

    python -m tests.benchmarks.gpu --hw h100 --out /tmp/gpu qwen05b_uk_law gemma3_270m_chat mistral7b_guanaco_qlora

Weights are random, the tokenizer and the documents are those that the project ships, so nothing is fetched: neither
changes what a step computes. A word after a colon changes the recipe: `mistral7b_guanaco_qlora:model.base=int8`. The
first steps are left out of the median. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SAME = [
    "model.init=random",
    "model.tokenizer_path=tpu_experiments/samples/tokenizer",
    "data_size=sample",
    "schedule.warmup_steps=0",
    "trainer.eval_every_steps=5",
    "trainer.max_eval_rows=2",
    "trainer.log_every_steps=1",
    "checkpoint.every_steps=0",
    "sample.max_new_tokens=0",
    "logger=jsonl",
]
LEFT_OUT = 3


def main() -> None:
    """Run every case in a process of its own and print a line of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--hw", default="h100")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("/tmp/gpu"))
    arguments = parser.parse_args()
    print("| case | s a step, median (least, most) | planned | tokens/s | GiB at most | planned | s before |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for number, case in enumerate(arguments.cases):
        recipe, *words = case.split(":")
        given = [f"experiment={recipe}", f"hw={arguments.hw}", *SAME, f"output_dir={arguments.out}", *words]
        given += [f"curriculum.stages.main={{epochs:null,steps:{arguments.steps}}}", f"name=case{number}"]
        began = time.time()
        planning = started("task=plan", *given)
        finish(started(*given))
        finish(planning)
        folder = arguments.out / f"case{number}"
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [record for record in records if "perf/step_seconds" in record]
        seconds = [step["perf/step_seconds"] for step in steps[LEFT_OUT:]]
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        file = arguments.out / "plans" / f"case{number}" / "plan.json"
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        print(
            f"| {case} | {statistics.median(seconds):.3f} ({min(seconds):.3f}, {max(seconds):.3f}) | "
            f"{plan['estimated_step_seconds']:.3f} | {steps[-1]['perf/tokens_per_second']:,.0f} | "
            f"{result['peak_device_memory_gib']:.2f} | {plan['hbm_gib_per_chip']['total']:.2f} | "
            f"{steps[0]['time'] - began - steps[0]['perf/step_seconds']:.0f} |",
            flush=True,
        )


def started(*overrides: str) -> subprocess.Popen[str]:
    """Start `python run.py ...`."""
    return subprocess.Popen(
        [sys.executable, "run.py", *overrides],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command; end with its last lines if it failed."""
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args}\n{printed[-6000:]}")


if __name__ == "__main__":
    main()
