"""The shipped reader's preference for the shorter right answer, by seed: pairs, answers, and what text costs.

python -m tests.benchmarks.preferring [--seeds 0 1 2] [--folder DIR]

Per seed four runs of run.py: an adapter that learns to answer (`name=sft`), `objective=dpo` from it, and one step
from either of which the evaluation before it counts: its loss on the held-out conversations and on the held-out text
of the kind that the base was pre-trained on. Two minutes a
seed on two quiet cores, and as long for the scoring.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tpu_experiments.samples.stories import story_text

MEASURES = ("loss", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")
TEXTS = ("stories_ro", "wiki_ro")
COLUMNS = ("seed", *MEASURES, "right of one person", "of several", "loss of conversations", "of text", "seconds")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--folder", type=Path)
    given = options.parse_args()
    place = given.folder or Path(tempfile.mkdtemp(prefix="preferring_"))
    place.mkdir(parents=True, exist_ok=True)
    drawn = random.Random("held out")
    text = place / "text.jsonl"
    text.write_text("".join(f"{json.dumps({'text': story_text(drawn)})}\n" for _ in range(200)))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for seed in given.seeds:
        print("| " + " | ".join(figures(place / f"seed_{seed}", seed, text=text)) + " |", flush=True)


def figures(place: Path, seed: int, *, text: Path) -> list[str]:
    """Train and score one seed, and return its row of the table."""
    seconds = run(place, "sft", f"seed={seed}")
    seconds += run(place, "dpo", f"seed={seed}", "objective=dpo", f"start.run={place / 'sft'}")
    for name in ("sft", "dpo"):
        run(
            *(place, f"{name}_scored", f"start.run={place / name}", "curriculum=single", "data=[stories_ro,wiki_ro]"),
            *(f"data.wiki_ro.path={text}", "data.wiki_ro.eval_fraction=0.5", "trainer.max_stage_steps=1"),
            *("optim.lr=1e-9", "trainer.max_eval_rows=64", "sample.max_new_tokens=0", "checkpoint.every_steps=0"),
        )
    result = json.loads((place / "dpo" / "result.json").read_text())
    before, after = ({"loss": result[f"eval_loss{at}"], **result[f"eval_measures{at}"]} for at in ("_before", ""))
    scored = [json.loads((place / f"{name}_scored" / "result.json").read_text()) for name in ("sft", "dpo")]
    return [
        str(seed),
        *(f"{before[name]:.3f} to {after[name]:.3f}" for name in MEASURES),
        *(f"{each['before'] * each['asked']:.0f} to {each['after'] * each['asked']:.0f}" for each in asked(result)),
        *(" to ".join(f"{each['eval_sources_before'][name]:.4f}" for each in scored) for name in TEXTS),
        f"{seconds:.0f}",
    ]


def asked(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Right answers of each set of questions, as shares."""
    return list(result["skill"]["sets"].values())


def run(place: Path, name: str, *words: str) -> float:
    """Run run.py to the end, and return its seconds; a run that is there is read."""
    started = time.monotonic()
    if not (place / name / "result.json").exists():
        subprocess.run(
            [sys.executable, "run.py", f"name={name}", f"output_dir={place}", *words], check=True, capture_output=True
        )
    return time.monotonic() - started


if __name__ == "__main__":
    main()
