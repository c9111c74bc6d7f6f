"""Every shipped recipe at full depth, compiled for its TPU on this machine: one table of what the plans say.

    python -m tests.benchmarks.recipes
    python -m tests.benchmarks.recipes --recipes qwen05b_uk_law --vary model.attention=sdpa model.remat=save_dots

Each recipe is planned as it is, and once more for every override of `--vary` on its own. Compiles are remembered in the
folder of `--output`, so a second run only prints.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
COLUMNS = (
    "recipe", "hw", "global batch x tokens", "GiB per chip", "fits", "step s", "tokens/s per chip", "MFU", "bound by",
    "$ per M tokens, spot / listed", "compile s",
)  # fmt: skip


def planned(name: str, *overrides: str, output: Path) -> dict[str, Any]:
    """plan.json of one config."""
    given = [f"name={name}", f"output_dir={output}", *overrides]
    command = [sys.executable, "run.py", "task=plan", "task.programs=train", *given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return dict(json.loads((output / "plans" / name / "plan.json").read_text()))


def row(plan: dict[str, Any], label: str) -> list[str]:
    """One line of the table."""
    memory = plan["hbm_gib_per_chip"]
    spot, listed = plan["usd_per_million_tokens_spot"], plan["usd_per_million_tokens"]
    step, speed, mfu = (plan[key] for key in ("estimated_step_seconds", "tokens_per_second_per_chip", "mfu"))
    return [
        label,
        plan["hw"],
        f"{plan['global_batch']} x {plan['seq_len']:,}",
        f"{memory['total']:.2f} of {memory['limit']:.2f}",
        "yes" if plan["fits"] else "no",
        f"{step:.3f}" if step else "-",
        f"{speed:,.0f}" if speed else "-",
        f"{100 * mfu:.1f} %" if mfu else "-",
        plan["bound_by"] or "-",
        f"{spot:.4f} / {listed:.4f}" if listed else "-",
        f"{plan['compile_seconds']:.0f}" if plan["compile_seconds"] else "-",
    ]


def main() -> None:
    """Print the table."""
    recipes = sorted(path.stem for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=recipes, choices=recipes)
    parser.add_argument("--vary", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path("outputs/recipes").absolute())
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for recipe in given.recipes:
        for override in ["", *given.vary]:
            name = f"{recipe}_{override.replace('=', '-')}" if override else recipe
            plan = planned(name, f"experiment={recipe}", *([override] if override else []), output=given.output)
            print(f"| {' | '.join(row(plan, override or recipe))} |", flush=True)


if __name__ == "__main__":
    main()
