"""What weights of a few bits cost a trained model: task=quantize by each method at equal bits, on held-out Romanian.

    python -m tests.benchmarks.quantising --out /tmp/quantising

The 3.2 million parameter Llama of tests/benchmarks/scratch.py, trained on real Romanian; then RTN and GPTQ in groups of
64, and VPTQ, whose codebooks weigh more in a small model than in a large one. Perplexities are over the tokens of the
test documents, with 95 % intervals of the ratio to the trained model over documents. What is finished in --out is not
run again. Prints Markdown.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.scratch import REPOSITORY, VOCAB_SIZE, data, run, train

SIZE = "3.2 M"
WAYS: dict[str, tuple[str, ...]] = {
    "RTN, 4 bits": ("task.method=rtn", "task.group=64"),
    "GPTQ, 4 bits": ("task.method=gptq", "task.group=64"),
    "RTN, 3 bits": ("task.method=rtn", "task.group=64", "task.bits=3"),
    "GPTQ, 3 bits": ("task.method=gptq", "task.group=64", "task.bits=3"),
    "RTN, 2 bits": ("task.method=rtn", "task.group=64", "task.bits=2"),
    "GPTQ, 2 bits": ("task.method=gptq", "task.group=64", "task.bits=2"),
    "VPTQ, vectors of 4, 256": ("task.method=vptq",),
    "VPTQ, vectors of 4, 256 and 256": ("task.method=vptq", "task.residual=256"),
    "VPTQ, vectors of 4, 256, a tenth outliers": ("task.method=vptq", "task.outliers=0.1"),
    "VPTQ, vectors of 2, 32": ("task.method=vptq", "task.vector=2", "task.codebook=32"),
}


def main() -> None:
    """Train the model, quantise it in every way, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/quantising"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    out = arguments.out
    run("task=tokenizer", f"task.vocab_size={VOCAB_SIZE}", *data(out), "name=tokenizer", f"task.folder={out}/tokenizer")
    trained = train(out, SIZE, rate=arguments.rate, steps=arguments.steps, seed=arguments.seed)
    print(f"{trained['num_parameters']:,} parameters, {arguments.steps} steps, seed {arguments.seed}\n")
    print("| way | bits a weight | lost in a layer, mean | perplexity | ratio | 95 % over documents |")
    print("|---|---|---|---|---|---|")
    for way in arguments.ways:
        number, words = list(WAYS).index(way), WAYS[way]
        facts = quantised(out, trained["name"], folder=out / f"{trained['name']}-{number}", words=words)
        (parity,) = facts["parity"]
        if way == arguments.ways[0]:
            print(f"| trained | 32 | | {parity['perplexity']:.3f} | | |")
        lost = list(facts["lost"].values())
        mean = f"{sum(lost) / len(lost):.4f}" if lost else ""
        interval = f"{parity['perplexity_ratio_low']:.4f} to {parity['perplexity_ratio_high']:.4f}"
        print(
            f"| {way} | {facts['bits_per_weight']:.3f} | {mean} | {parity['export_perplexity']:.3f} | "
            f"{parity['perplexity_ratio']:.4f} | {interval} |",
            flush=True,
        )


def quantised(out: Path, name: str, *, folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """Quantise the run; return export.json."""
    method = next(word.removeprefix("task.method=") for word in words if word.startswith("task.method="))
    file = folder / method / "export.json"
    if not file.exists():
        command = ["run.py", "task=quantize", f"task.run={out / name}", *words, f"task.folder={folder}", "hw=cpu"]
        # Two bits cost more than the limit, which is exit code 1.
        done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


if __name__ == "__main__":
    main()
