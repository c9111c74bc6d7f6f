"""Memory and time of a step over a long run: a picture, and what the first and the last quarter differ by.

    python -m tests.benchmarks.steadiness --steps 2000 --out tests/benchmarks/steadiness.png

One run on torch_xla's CPU device with evaluations, samples and checkpoints on the way. Its memory is read once a second
from /proc, anonymous pages alone (files that are mapped come and go with the page cache); seconds a step are those of
its records. Prints Markdown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from tests.benchmarks.anonymous import anonymous_mib

REPOSITORY = Path(__file__).parents[2]
JOB = (
    "model=tiny", "data=sample_text", "curriculum=single", "trainer.seq_len=128", "trainer.global_batch_rows=4",
    "trainer.log_every_steps=10", "trainer.eval_every_steps=100", "trainer.max_eval_rows=16", "lora.dropout=0.1",
    "checkpoint.every_steps=100", "checkpoint.keep_last=2", "sample.max_new_tokens=8", "logger=jsonl", "name=steady",
)  # fmt: skip


def main() -> None:
    """Run, draw and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "run.py", *JOB, f"curriculum.stages.main.steps={arguments.steps}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*command, f"output_dir={place}"], cwd=REPOSITORY, **quiet)  # type: ignore[call-overload]
        memory: list[tuple[float, float]] = []
        while process.poll() is None:
            memory.append((time.time(), anonymous_mib(process.pid)))
            time.sleep(1)
        if process.returncode:
            raise SystemExit(process.stderr.read().decode()[-3000:])
        lines = Path(place, "steady", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        result = json.loads(Path(place, "steady", "result.json").read_text(encoding="utf-8"))
    steps = [record for record in map(json.loads, lines) if "perf/step_seconds" in record]
    times = [(float(r["time"]), int(r["step"]), 1000 * float(r["perf/step_seconds"])) for r in steps]
    by_step = [(step, value) for when, value in memory if (step := step_at(when, times)) is not None]
    figure = drawn(by_step, [(step, ms) for _, step, ms in times])
    figure.savefig(arguments.out, dpi=110)
    quarter = arguments.steps // 4
    print("| | steps | MiB, anonymous, median | ms a step, median |\n|---|---|---|---|")
    for name, low, high in (("second quarter", quarter, 2 * quarter), ("last quarter", 3 * quarter, 4 * quarter)):
        mib = statistics.median(value for step, value in by_step if low < step <= high)
        ms = statistics.median(value for _, step, value in times if low < step <= high)
        print(f"| {name} | {low + 1} to {high} | {mib:.1f} | {ms:.2f} |")
    spent = result["goodput"]["run"]["seconds"]
    print(f"\n{result['num_compiles']} programs, {result['compiles_after_warmup']} after warm-up.")
    print(f"Seconds of the run: {', '.join(f'{name} {seconds:.1f}' for name, seconds in spent.items())}.")


def step_at(when: float, times: list[tuple[float, int, float]]) -> int | None:
    """Return the step of the first record after a moment; None before the first and after the last."""
    if not times or when < times[0][0]:
        return None
    return next((step for then, step, _ in times if then >= when), None)


def drawn(memory: list[tuple[int, float]], seconds: list[tuple[int, float]]) -> Figure:
    """Return a figure of memory above seconds a step."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot([step for step, _ in memory], [mib for _, mib in memory], color="#2a6f97", linewidth=1)
    upper.set_ylabel("anonymous memory, MiB")
    upper.set_ylim(bottom=0)
    lower.plot([step for step, _ in seconds], [ms for _, ms in seconds], color="#c1666b", linewidth=1)
    lower.set_ylabel("ms a step, mean of ten")
    lower.set_ylim(bottom=0, top=3 * statistics.median(ms for _, ms in seconds))
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
