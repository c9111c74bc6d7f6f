"""One recipe's training step by both backends, compiled by one libtpu: memory, FLOPs of products, cycles by class.

    python -m tests.benchmarks.backends --out /tmp/backends --experiments qwen05b_uk_law mistral7b_guanaco

torch_xla lowers it in this environment, TorchTPU in `.venv-torchtpu` (tpu_experiments/runtime/README.md), and the
libtpu of the latter compiles both (task.libtpu), with the recipe's own settings (tuned=off: the lines of
conf/tuned.yaml are for torch_xla alone). What is planned in --out is not planned again. Prints Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_experiments.planning.hlo.program import read_program

REPOSITORY = Path(__file__).parents[2]
OTHER = REPOSITORY / ".venv-torchtpu"
CLASSES = {
    "matmul": "products",
    "elementwise": "element by element",
    "copy": "copies",
    "reduce": "sums",
    "gather_scatter": "gathers",
    "other": "other",
}


@dataclass(frozen=True)
class Step:
    """One backend's plan of a recipe."""

    plan: dict[str, Any]
    dot_flops: float

    @property
    def gib(self) -> float:
        """Memory of a chip."""
        return float(self.plan["hbm_gib_per_chip"]["total"])

    @property
    def cycles(self) -> int:
        """Estimated cycles of the step on one chip, without kernels."""
        return int(self.plan["estimated_cycles"])


def main() -> None:
    """Plan every recipe by both backends, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/backends"))
    parser.add_argument("--experiments", nargs="+", required=True)
    parser.add_argument("--words", nargs="*", default=[], help="further overrides, such as hw=v6e1")
    arguments = parser.parse_args()
    titles = ("recipe", "backend", "GiB per chip", "estimated s", "FLOPs of products", "million cycles", "by class")
    print(f"| {' | '.join(titles)} | compiled in s |\n|{'---|' * (len(titles) + 1)}")
    for experiment in arguments.experiments:
        for backend in ("torch_xla", "TorchTPU"):
            print(row(experiment, backend, step_of(arguments.out, experiment, backend, arguments.words)), flush=True)


def step_of(out: Path, experiment: str, backend: str, words: list[str]) -> Step | str:
    """Plan a recipe by a backend, or read the plan that is there; return the error's sentence where there is none."""
    name = f"{experiment}-{backend}"
    file = out / "plans" / name / "plan.json"
    if not file.exists():
        by_torch_xla = backend == "torch_xla"
        python = sys.executable if by_torch_xla else str(OTHER / "bin" / "python")
        own = f"task.libtpu={OTHER}" if by_torch_xla else "hw.runtime=torchtpu"
        command = [python, "run.py", "task=plan", "task.programs=train", "task.workers=1", "tuned=off"]
        given = {**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        done = subprocess.run(
            [*command, f"experiment={experiment}", *words, own, f"output_dir={out}", f"name={name}"],
            cwd=REPOSITORY,
            env=given,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return next((line for line in reversed(done.stderr.splitlines()) if "error" in line.lower()), "no answer")
    plan = json.loads(file.read_text())
    fingerprint = next(program["fingerprint"] for program in plan["programs"] if program["name"] == "train")
    text = (out / "plans" / "compiled" / fingerprint / "optimized.hlo").read_text()
    return Step(plan, read_program(text).dot_flops)


def row(experiment: str, backend: str, step: Step | str) -> str:
    """Return one line of the table."""
    if isinstance(step, str):
        return f"| `{experiment}` | {backend} | {step} | | | | | |"
    plan = step.plan
    classes = plan["estimated_cycles_by_class"]
    shown = ", ".join(f"{classes[name] / 1e6:,.1f} {word}" for name, word in CLASSES.items() if classes[name] > 5e4)
    seconds = sum(program["compile_seconds"] or 0 for program in plan["programs"])
    return (
        f"| `{experiment}`, {plan['hw']} | {backend} | {step.gib:.2f} | {plan['estimated_step_seconds'] or 0:.3f} | "
        f"{step.dot_flops:.4g} | {step.cycles / 1e6:,.1f} | {shown} | {seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
