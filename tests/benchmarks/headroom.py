"""The head-room that one compilation shows, held against the compiler's own out-of-memory: the largest micro-batch.

    python -m tests.benchmarks.headroom

The global batch of each recipe is raised until there are micro-batches which do not fit; its divisors are the rungs.
"""

import argparse
from pathlib import Path

from tests.benchmarks.recipes import planned

RECIPES = {"mistral7b_ro": (8, 96, 8), "qwen05b_uk_law": (8, 96, 4), "gemma3_270m_chat": (1, 768, 32)}
"""Name to (chips, rows per chip of the global batch, rows per chip of the first micro-batch)."""


def main() -> None:
    """Print every rung that was compiled, and the prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("outputs/headroom").absolute())
    given = parser.parse_args()
    print("| recipe | rows per chip: GiB, predicted GiB, fits | verdict |\n|---|---|---|")
    for recipe in given.recipes:
        chips, total, micro = RECIPES[recipe]
        rows = (f"trainer.global_batch_rows={total * chips}", f"trainer.micro_batch_rows={micro}")
        plan = planned(recipe, f"experiment={recipe}", "task.explore=ladder", *rows, output=given.output)
        rungs = []
        for rung in plan["micro_batch_ladder"]:
            predicted = "-" if rung["predicted_gib"] is None else f"{rung['predicted_gib']:.2f}"
            fits = "yes" if rung["fits"] else "no"
            rungs.append(f"{rung['micro_batch']}: {rung['total_gib']:.2f}, {predicted}, {fits}")
        print(f"| {recipe} | {'; '.join(rungs)} | {plan['notes'][0]} |", flush=True)


if __name__ == "__main__":
    main()
