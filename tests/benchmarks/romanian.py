"""What the two Romanian stages are worth, on real text: a model from scratch, several orders, several seeds.

    python -m tests.benchmarks.romanian --seeds 0 1 2 --jobs 3

Prose and conversations of the development data (../shared/data), a byte-level BPE of their own, a decoder of
1.3 million parameters with random weights, every weight trained. All plans but the first have the same number of steps,
so the same computing. `task=evaluate` measures bits per byte on the test split, with intervals over its documents.
Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tpu_experiments.samples.make_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, train

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY.parent / "shared" / "data"
TEXT_STEPS, CHAT_STEPS = 300, 100
STAGES = "curriculum.stages"
PLANS: dict[str, tuple[str, ...]] = {
    "conversations alone, 100 steps": (
        "curriculum=single",
        f"{STAGES}.main.kind=chat",
        f"{STAGES}.main.steps={CHAT_STEPS}",
    ),
    "conversations alone, 400 steps": (
        "curriculum=single",
        f"{STAGES}.main.kind=chat",
        f"{STAGES}.main.steps={TEXT_STEPS + CHAT_STEPS}",
    ),
    "text, then conversations": (),
    "text, then conversations with 25 % text": (f"{STAGES}.chat.replay=0.25",),
    "both mixed, one stage": ("curriculum=single", f"{STAGES}.main.steps={TEXT_STEPS + CHAT_STEPS}"),
    "text, then conversations with 50 % text": (f"{STAGES}.chat.replay=0.5",),
    "text, then conversations, moments fresh": (f"{STAGES}.chat.optimizer=fresh",),
}
TWO_STAGES = (
    "curriculum=text_then_chat",
    f"{STAGES}.text.steps={TEXT_STEPS}",
    f"{STAGES}.chat.steps={CHAT_STEPS}",
    f"{STAGES}.chat.lr=1e-3",
)
SOURCES = {"wiki_ro": "ro_text.jsonl", "ultrachat_ro": "ro_chat.jsonl"}


def main() -> None:
    """Tokenizer, runs, table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("/tmp/romanian"))
    arguments = parser.parse_args()
    write_tokenizer(arguments.out / "tokenizer")
    common = settings(arguments.out)
    run(*common, "task=prepare", "name=prepared")
    points = [(plan, seed) for plan in PLANS for seed in arguments.seeds]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = dict(zip(points, pool.map(lambda point: measured(*point, common, arguments.out), points), strict=True))
    print(table(found, seeds=arguments.seeds))


def texts() -> Iterator[str]:
    """Prose and turns."""
    with (DATA / "ro_text.jsonl").open(encoding="utf-8") as lines:
        yield from (json.loads(line)["text"] for line in lines)
    with (DATA / "ro_chat.jsonl").open(encoding="utf-8") as lines:
        yield from (turn for line in lines for turn in json.loads(line)["data"])


def write_tokenizer(folder: Path) -> None:
    """Trained on all documents, held-out ones too: bits per byte does not depend on how it cuts them."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train(texts()), bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=1024
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB_SIZE
    tokenizer.save_pretrained(folder)


def settings(out: Path) -> list[str]:
    """What all runs share."""
    return [
        "model=tiny",
        "model.init=random",
        "lora=none",
        f"model.tokenizer_path={out}/tokenizer",
        "data=[wiki_ro,ultrachat_ro]",
        *(f"data.{name}.path={DATA / file}" for name, file in SOURCES.items()),
        # Whole chapters, blanks as they are: what the recipe's rules would drop is what there is.
        "data.wiki_ro.clean={scope:document,min_chars:null,max_chars:null,punctuation:null,language:null,max_paragraphs:null}",
        "trainer.seq_len=256",
        "trainer.global_batch_rows=16",
        "trainer.eval_every_steps=0",
        "optim.lr=3e-3",
        "optim.weight_decay=0.1",
        "schedule.warmup_steps=10",
        "hw.num_threads=1",
        "checkpoint.every_steps=0",
        "sample.max_new_tokens=0",
        "logger=jsonl",
        f"output_dir={out}",
    ]


def measured(plan: str, seed: int, common: list[str], out: Path) -> dict[str, Any]:
    """Train, and evaluate on the test split; what is there already is not run again."""
    name = f"plan{list(PLANS).index(plan)}_{seed}"
    results = out / name / "test_results.json"
    if not results.exists():
        chosen = PLANS[plan] if "curriculum=single" in PLANS[plan] else (*TWO_STAGES, *PLANS[plan])
        run(*common, *chosen, f"seed={seed}", f"name={name}")
        run("task=evaluate", f"task.run={out / name}", "hw.num_threads=1", f"output_dir={out}")
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def run(*overrides: str) -> None:
    """`python run.py ...`."""
    done = subprocess.run(
        [sys.executable, "run.py", *overrides],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def table(found: dict[tuple[str, int], dict[str, Any]], *, seeds: list[int]) -> str:
    """Bits per byte by plan: mean and spread over the seeds, and the documents' interval of the first seed."""
    lines = [
        "| trained on | bits per byte, prose | of the first seed | bits per byte, answers | of the first seed |",
        "|---|---|---|---|---|",
    ]
    first = found[next(iter(PLANS)), seeds[0]]["sources"]
    untrained = (cell([first[name]["base"]["bits_per_byte"]["value"]]) for name in SOURCES)
    lines.append("| nothing (random weights) | " + " | | ".join(untrained) + " | |")
    for plan in PLANS:
        cells = []
        for name in SOURCES:
            told = [found[plan, seed]["sources"][name]["trained"]["bits_per_byte"] for seed in seeds]
            cells += [cell([each["value"] for each in told]), f"{told[0]['low']:.3f} to {told[0]['high']:.3f}"]
        lines.append(f"| {plan} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: list[float]) -> str:
    """Mean, and the standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
