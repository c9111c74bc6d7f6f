"""Several points in one program: wall time here beside one process per point, and planned steps.

python -m tests.benchmarks.packs wall --folder /tmp/packs      # eight tiny points, one after the other and packed
python -m tests.benchmarks.packs plans --folder /tmp/packs     # steps of one and of eight adapters, compiled
python -m tests.benchmarks.packs wall --preferences --folder /tmp/packs     # the same of objective=dpo, plans too
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
GRID = ("lora.r=4,8,16,32", "optim.lr=3e-4,1e-3")
JOB = (
    "model=tiny", "data=sample_text", "curriculum=single", "curriculum.stages.main.steps=120", "trainer.seq_len=128",
    "trainer.global_batch_rows=4", "trainer.log_every_steps=10", "trainer.eval_every_steps=0",
    "trainer.max_eval_rows=32", "sample.max_new_tokens=8", "checkpoint.every_steps=0",
)  # fmt: skip
ONE_ROW = "trainer.micro_batch_rows=1"
PAIRS = ("objective=dpo", "data=stories_pairs_ro", "data.stories_pairs_ro.max_documents=400")
GRID_OF_PAIRS = ("objective.beta=0.05,0.1,0.2,0.5", "optim.lr=3e-4,1e-3")
QWEN_OF_PAIRS = ("experiment=qwen05b_dpo", "tuned=off", "sharding=replicated", "trainer.micro_batch_rows=1")
QWEN = ("experiment=qwen05b_uk_law", "sharding=replicated", ONE_ROW, "lora=all_linear_r16", "lora.alpha=32")
MISTRAL = (
    "experiment=mistral7b_guanaco",
    "hw=v5e8",
    "sharding=fsdp",
    ONE_ROW,
    "trainer.global_batch_rows=8",
    "trainer.seq_len=512",
)
ADAPTERS = 8


def run(*words: str, folder: Path) -> None:
    """Run a command of the repository."""
    env = {**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "run.py", *words, f"output_dir={folder}"]
    subprocess.run(command, cwd=REPOSITORY, env=env, check=True, stdout=subprocess.DEVNULL)


def wall(folder: Path, *, are_pairs: bool) -> None:
    """Time the sweep both ways, packed first, and compare the held-out losses."""
    seconds, losses = {}, {}
    job = (
        (*[word for word in JOB if not word.startswith("data=")], *PAIRS, *GRID_OF_PAIRS)
        if are_pairs
        else (*JOB, *GRID)
    )
    for pack in (str(ADAPTERS), "off"):
        began = time.monotonic()
        run("-m", *job, f"name=pack_{pack}", f"sweeping.pack={pack}", folder=folder)
        seconds[pack] = time.monotonic() - began
        rows = json.loads((folder / "sweeps" / f"pack_{pack}" / "sweep.json").read_text())["points"]
        losses[pack] = {row["name"]: row["eval_loss"] for row in rows}
    together, alone = losses.values()
    furthest = max(abs(together[name] - alone[name]) for name in alone)
    packed, apart = seconds.values()
    print(f"{len(alone)} points: {apart:.1f} s one after the other, {packed:.1f} s packed, {apart / packed:.2f} times")
    print(f"largest difference of a held-out loss {furthest:.1e}")


def step_of(*words: str, name: str, adapters: int, folder: Path) -> tuple[float, float]:
    """Return the planned seconds of a step, and GiB per chip."""
    more = ("task=plan", "task.workers=1", "task.programs=train", f"task.pack={adapters}", f"name={name}_{adapters}")
    run(*words, *more, folder=folder)
    plan = json.loads((folder / "plans" / f"{name}_{adapters}" / "plan.json").read_text())
    return plan["estimated_step_seconds"], plan["hbm_gib_per_chip"]["total"]


def plans(folder: Path, *, are_pairs: bool) -> None:
    """Print the steps of one and of eight adapters."""
    cases: list[tuple[str, Sequence[str]]] = [
        (f"qwen_{hw}_{tokens}", (*QWEN, f"hw={hw}", f"trainer.seq_len={tokens}", "trainer.global_batch_rows=1"))
        for hw in ("v6e1", "v5e1")
        for tokens in (1024, 128)
    ]
    cases.append(("mistral_v5e8_512", MISTRAL))
    if are_pairs:
        few = ("trainer.seq_len=1024", "trainer.global_batch_rows=1")
        cases = [("qwen_dpo_v5e1_1024", (*QWEN_OF_PAIRS, "hw=v5e1", *few))]
    print("| case | one adapter, s | eight, s | eight / 8 x one | GiB per chip, one and eight |\n|---|---|---|---|---|")
    for name, words in cases:
        one, few = step_of(*words, name=name, adapters=1, folder=folder)
        eight, many = step_of(*words, name=name, adapters=ADAPTERS, folder=folder)
        print(
            f"| {name} | {one:.4f} | {eight:.4f} | {eight / one / ADAPTERS:.3f} | {few:.2f}, {many:.2f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("wall", "plans"))
    parser.add_argument("--folder", type=Path, required=True, help="output_dir; a new one")
    parser.add_argument("--preferences", action="store_true", help="points of objective=dpo")
    args = parser.parse_args()
    {"wall": wall, "plans": plans}[args.what](args.folder, are_pairs=args.preferences)


if __name__ == "__main__":
    main()
