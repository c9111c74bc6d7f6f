"""Shipped recipes compiled for their TPUs: ours, transformers + PEFT as users run them, ours without one thing each.

    python -m tests.benchmarks.ablation [--recipes qwen05b_uk_law] [--removed model.attention=sdpa] [--output FOLDER]

One reader tells all programs' HBM, step and its parts (tpu_experiments/planning/hlo/parts.py says by which rule), in
milliseconds of one optimizer step on one chip: the TPU compiler's cycles, Pallas kernels by FLOPs and bytes, and
collectives that nothing hides. The rival is tests/benchmarks/rival.py. Compiles take minutes each and are remembered
in the folder of `--output`, so a second run only prints.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.recipes import REPOSITORY, planned
from tpu_experiments.planning.hlo.parts import PARTS

COLUMNS = ("program", "GiB per chip", *PARTS, "step ms", "tokens/s per chip", "compile s")
MISTRAL = ("lora=all_linear_r16", "model.remat=save_dots")
OURS = {"mistral7b_ro": MISTRAL, "qwen05b_uk_law": (), "gemma3_270m_chat": ()}
"""Recipe to the overrides of ours that the others are held against."""
RIVALS = {
    "mistral7b_ro": {
        "PEFT, FSDP, transformers' checkpoints": ("layer", "lora=all_linear_r16"),
        "PEFT, FSDP, `xla_fsdp_grad_ckpt`": ("module", "lora=all_linear_r16"),
    },
    "qwen05b_uk_law": {"PEFT": ("layer",)},
    "gemma3_270m_chat": {
        "PEFT": ("layer",),
        "PEFT, 8 rows, not accumulated": ("layer", "trainer.global_batch_rows=8", "trainer.micro_batch_rows=8"),
    },
}
"""Recipe to what rival.py is told."""
REMOVED = {
    "mistral7b_ro": (
        "model.attention=sdpa",
        "trainer.loss_chunk_tokens=null",
        "model.remat=layer_inputs",
        "hw.libtpu_flags=[]",
        "hw.attention_block=512",
        "model.stack_group=2",
    ),
    "qwen05b_uk_law": (
        "model.attention=sdpa",
        "trainer.loss_chunk_tokens=null",
        "model.remat=layer_inputs",
        "model.stack=unrolled",
        "hw.attention_block=512",
        "model.stack_group=2",
        "sharding=fsdp",
    ),
    "gemma3_270m_chat": (
        "model.attention=sdpa",
        "trainer.loss_chunk_tokens=null",
        "model.remat=layer_inputs",
        "model.stack=unrolled",
    ),
}


def rival(*overrides: str, output: Path) -> dict[str, Any]:
    """What rival.py prints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.rival", str(output), *overrides]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(plan: dict[str, Any], label: str) -> list[str]:
    """One line of the table."""
    memory, seconds = plan["hbm_gib_per_chip"], plan["estimated_step_seconds"]
    gib = f"{memory['total']:.2f} of {memory['limit']:.2f}"
    if not seconds:
        return [label, gib, *["-"] * len(PARTS), "does not fit", "-", "-"]
    parts = plan["estimated_step_by_part"]
    return [
        label,
        gib,
        *(f"{1000 * parts[part]:,.1f}" for part in PARTS),
        f"{1000 * seconds:,.1f}",
        f"{plan['tokens_per_second_per_chip']:,.0f}",
        f"{plan['compile_seconds']:.0f}",
    ]


def rows(recipe: str, *, removed: list[str] | None, output: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and plan of every program of a recipe, compiled one after the other."""
    experiment = f"experiment={recipe}"
    for name, (checkpoints, *given) in RIVALS[recipe].items():
        yield name, rival(checkpoints, experiment, *given, output=output)
    label = " ".join(["ours", *(f"`{override}`" for override in OURS[recipe])])
    yield label, planned(recipe, experiment, *OURS[recipe], output=output)
    for override in REMOVED[recipe] if removed is None else removed:
        key = override.partition("=")[0]
        kept = [given for given in OURS[recipe] if given.partition("=")[0] != key]
        name = f"{recipe}_{override.replace('=', '-').replace('[]', 'none')}"
        yield f"`{override}`", planned(name, experiment, *kept, override, output=output)


def main() -> None:
    """Print a table for every recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=list(OURS), choices=list(OURS))
    parser.add_argument("--removed", nargs="*", metavar="KEY=VALUE", help="what is removed, instead of everything")
    parser.add_argument("--output", type=Path, default=Path("outputs/ablation"))
    given = parser.parse_args()
    for recipe in given.recipes:
        print(f"\n{recipe}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for label, plan in rows(recipe, removed=given.removed, output=given.output.absolute()):
            print(f"| {' | '.join(row(plan, label))} |", flush=True)


if __name__ == "__main__":
    main()
