"""The head-room that one compilation shows, held against the compiler's own out-of-memory: the largest micro-batch.

    python -m tests.benchmarks.headroom

The global batch of each recipe is raised to 96 rows a chip, so that there are micro-batches which do not fit.
"""

import argparse
from pathlib import Path

from tests.benchmarks.recipes import planned

ROWS = 96
"""Its divisors are the rungs: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96."""
RECIPES = {"mistral7b_ro": (8, 8), "qwen05b_uk_law": (8, 4), "gemma3_270m_chat": (1, 32)}
"""Name to (chips, rows of the first micro-batch)."""


def main() -> None:
    """Print every rung that was compiled, and the prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("outputs/headroom").absolute())
    given = parser.parse_args()
    print("| recipe | rows per chip: GiB, predicted GiB, fits | verdict |\n|---|---|---|")
    for recipe in given.recipes:
        chips, micro = RECIPES[recipe]
        rows = (f"trainer.global_batch_rows={ROWS * chips}", f"trainer.micro_batch_rows={micro}")
        plan = planned(recipe, f"experiment={recipe}", "task.explore=ladder", *rows, output=given.output)
        rungs = []
        for rung in plan["micro_batch_ladder"]:
            predicted = "-" if rung["predicted_gib"] is None else f"{rung['predicted_gib']:.2f}"
            fits = "yes" if rung["fits"] else "no"
            rungs.append(f"{rung['micro_batch']}: {rung['total_gib']:.2f}, {predicted}, {fits}")
        print(f"| {recipe} | {'; '.join(rungs)} | {plan['notes'][0]} |", flush=True)


if __name__ == "__main__":
    main()
