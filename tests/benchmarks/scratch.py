"""Pre-training from scratch at small scale: larger models compress held-out text better, and better than n-grams.

    python -m tests.benchmarks.scratch --out /tmp/scratch

Decoders of 0.6, 1.4 and 3.2 million parameters in the shape of model=llama_mini, with the settings of
experiment=llama_mini_pretrain, read the same tokens of real Romanian (../shared/data/ro_text.jsonl) in the same order.
The tokenizer is one of task=tokenizer, trained on the training documents alone. Each size chooses between two learning
rates by its loss on the evaluation split after a twelfth of the steps; the test split (task=evaluate) chooses nothing.
Beside them on the same bytes: interpolated Kneser-Ney over bytes, gzip and xz, with the training text before the test
text. What is finished in --out is not run again. Prints Markdown.
"""

import argparse
import gzip
import json
import lzma
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_experiments.data.cleaning.duplicates import content_key
from tpu_experiments.data.cleaning.split import SPLITS, split_codes
from tpu_experiments.data.documents import Document

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY.parent / "shared" / "data" / "ro_text.jsonl"
HELD_OUT = 0.05
"""Share of the documents that chooses the rate, and of those that measure."""
SIZES: dict[str, dict[str, int]] = {
    "0.1 M": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2},
    "0.2 M": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_key_value_heads": 2},
    "0.6 M": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 2},
    "1.4 M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_key_value_heads": 2},
    "3.2 M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_key_value_heads": 2},
}
VOCAB_SIZE, NUM_HEADS, SEQ_LEN, ROWS = 1024, 4, 256, 4
TRIAL = 12
"""A rate is chosen after this part of the steps."""
ORDERS = (3, 4, 5, 6)


def main() -> None:
    """Train the tokenizer and every model, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/scratch"))
    parser.add_argument("--steps", type=int, default=7200)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 6e-3])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES)[2:])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="the first chooses the rate")
    parser.add_argument("--hw", choices=["cpu", "gpu"], default="cpu")
    arguments = parser.parse_args()
    out, steps, hw = arguments.out, arguments.steps, arguments.hw
    run("task=tokenizer", f"task.vocab_size={VOCAB_SIZE}", *data(out), "name=tokenizer", f"task.folder={out}/tokenizer")
    found: dict[str, list[tuple[float, int, dict[str, Any]]]] = {}
    for size in arguments.sizes:
        best = chosen_rate(out, size, rates=arguments.rates, steps=steps // TRIAL, seed=arguments.seeds[0], hw=hw)
        found[size] = []
        for seed in arguments.seeds:
            found[size].append((best, seed, tested(out, train(out, size, rate=best, steps=steps, seed=seed, hw=hw))))
            print(table(found), flush=True)
    print(rivals(*split_texts(FILE)))


def chosen_rate(out: Path, size: str, *, rates: Sequence[float], steps: int, seed: int, hw: str) -> float:
    """Return the rate with the lowest loss of the evaluation split after `steps`; nothing is run for one alone."""
    if len(rates) == 1:
        return rates[0]
    losses = {rate: train(out, size, rate=rate, steps=steps, seed=seed, hw=hw)["eval_loss"] for rate in rates}
    for rate, loss in losses.items():
        print(f"{size}, rate {rate:g}, {steps} steps: loss {loss:.4f}", flush=True)
    return min(losses, key=lambda rate: losses[rate])


def data(out: Path, hw: str = "cpu") -> list[str]:
    """Return the overrides that name the text, whole, its split, and the machine."""
    return [
        "data=wiki_ro",
        f"data.wiki_ro.path={FILE}",
        "data.wiki_ro.clean={scope:document,unicode:keep,romanian_letters:keep,whitespace:keep,min_chars:null,"
        "max_chars:null,punctuation:null,language:null,max_paragraphs:null}",
        "data.wiki_ro.duplicates={exact:keep,near:null}",
        f"data.wiki_ro.eval_fraction={HELD_OUT}",
        f"data.wiki_ro.test_fraction={HELD_OUT}",
        f"hw={hw}",
        "hw.num_threads=1",
        f"output_dir={out}",
    ]


def train(
    out: Path,
    size: str,
    *,
    rate: float,
    steps: int,
    seed: int,
    experiment: str = "llama_mini_pretrain",
    kind: str = "",
    more: Sequence[str] = (),
    hw: str = "cpu",
) -> dict[str, Any]:
    """Train a model from scratch; return its result.json.

    Args:
        kind: a word in the run's name that stands for the experiment.
        more: overrides of the stages, in the place of one of these steps.
    """
    name = f"{kind}{size.replace(' ', '')}-{rate:g}-{steps}-{seed}"
    file = out / name / "result.json"
    width = SIZES[size]["hidden_size"]
    arch = {**SIZES[size], "num_attention_heads": NUM_HEADS, "head_dim": width // NUM_HEADS}
    if not file.exists():
        run(
            f"experiment={experiment}",
            *data(out, hw),
            *(f"model.arch.{key}={value}" for key, value in {**arch, "vocab_size": VOCAB_SIZE}.items()),
            # 0.02 at the width of llama_mini, and the same multiple of 1 / sqrt(width) here.
            f"+model.arch.initializer_range={0.02 * math.sqrt(768 / width):.4f}",
            "model.dtype=float32",
            "model.remat=none",
            f"model.tokenizer_path={out}/tokenizer",
            *(more or [f"curriculum.stages.main={{tokens_per_parameter:null,steps:{steps}}}"]),
            f"optim.lr={rate}",
            f"trainer={{seq_len:{SEQ_LEN},global_batch_rows:{ROWS},eval_every_steps:0,max_eval_rows:100000,"
            "loss_chunk_tokens:null}",
            "checkpoint.every_steps=0",
            "sample.max_new_tokens=0",
            "logger=jsonl",
            f"seed={seed}",
            f"name={name}",
        )
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def tested(out: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return a run's measures on the test split."""
    file = out / result["name"] / "test_results.json"
    if not file.exists():
        run("task=evaluate", f"task.run={out / result['name']}", "hw=cpu", "hw.runtime=eager", "hw.num_threads=1")
    source = json.loads(file.read_text())["sources"]["wiki_ro"]
    return {"parameters": result["num_parameters"], "tokens": result["stages"][0]["tokens"], **source["trained"]}


def run(*overrides: str) -> None:
    """Run `python run.py ...` to its end."""
    done = subprocess.run(
        [sys.executable, "run.py", *overrides],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


# ---- text models to compare with ----------------------------------------------------------------------------


def split_texts(file: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the training and the test documents, as the runs split them."""
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    keys = b"".join(content_key(Document("", text=text))[:8] for text in texts)
    codes = split_codes(np.frombuffer(keys, np.uint64), eval_fraction=HELD_OUT, test_fraction=HELD_OUT)
    parts = {
        split: [t.encode() for t, c in zip(texts, codes, strict=True) if SPLITS[c] == split]
        for split in ("train", "test")
    }
    return parts["train"], parts["test"]


def rivals(train: list[bytes], test: list[bytes]) -> str:
    """Return bits per byte of the test documents by n-grams and compressors."""
    num_bytes = sum(map(len, test))
    lines = [
        f"{len(train)} training documents, {sum(map(len, train)):,} bytes; {len(test)} test, {num_bytes:,} bytes",
        "",
    ]
    lines += ["| | bits per byte |", "|---|---|"]
    for order in ORDERS:
        model = KneserNey(train, order=order)
        lines.append(f"| Kneser-Ney of order {order} over bytes | {model.bits(test) / num_bytes:.3f} |")
    before, both = b"\n".join(train), b"\n".join([*train, *test])
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gzip -9": lambda data: gzip.compress(data, 9),
        "xz -9e": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    for name, compressed in compressors.items():
        after = 8 * (len(compressed(both)) - len(compressed(before))) / num_bytes
        alone = 8 * len(compressed(b"\n".join(test))) / num_bytes
        lines.append(f"| {name}, after the training text (without it) | {after:.3f} ({alone:.3f}) |")
    return "\n".join(lines)


class KneserNey:
    """Interpolated Kneser-Ney over bytes (Chen and Goodman 1999), one discount per order, 1/256 below the unigrams.

    Every document begins with an empty context, and its first bytes are predicted by the lower orders.
    """

    def __init__(self, documents: Iterable[bytes], *, order: int) -> None:
        self.order = order
        counts: list[Counter[bytes]] = [Counter() for _ in range(order + 1)]
        for text in documents:
            counts[order].update(text[i : i + order] for i in range(len(text) - order + 1))
            for short in range(1, order):  # a document's beginning has no longer context
                counts[short][text[:short]] += 1
        for length in range(order - 1, 0, -1):  # continuation counts: how many bytes come before
            counts[length].update(gram[1:] for gram in counts[length + 1])
        self.counts = counts
        self.totals: list[Counter[bytes]] = [Counter() for _ in range(order + 1)]
        self.kinds: list[Counter[bytes]] = [Counter() for _ in range(order + 1)]
        self.discounts = [0.0] * (order + 1)
        for length in range(1, order + 1):
            for gram, count in counts[length].items():
                self.totals[length][gram[:-1]] += count
                self.kinds[length][gram[:-1]] += 1
            once, twice = (sum(count == n for count in counts[length].values()) for n in (1, 2))
            self.discounts[length] = once / (once + 2 * twice) if once else 0.5

    def bits(self, documents: Iterable[bytes]) -> float:
        """Return the bits of all documents."""
        return sum(
            -math.log2(self.probability(text[max(0, i - self.order + 1) : i + 1]))
            for text in documents
            for i in range(len(text))
        )

    def probability(self, gram: bytes) -> float:
        """Return the probability of the last byte after those before it."""
        found = 1 / 256
        for length in range(1, len(gram) + 1):
            own = gram[-length:]
            total = self.totals[length].get(own[:-1], 0)
            if not total:
                break
            discount = self.discounts[length]
            kept = max(self.counts[length].get(own, 0) - discount, 0.0)
            found = (kept + discount * self.kinds[length][own[:-1]] * found) / total
        return found


def table(found: dict[str, list[tuple[float, int, dict[str, Any]]]]) -> str:
    """Return the models' bits per byte, with the interval over documents."""
    lines = [
        "| model | parameters | rate | seed | tokens | bits per byte | 95 % over documents |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, runs in found.items():
        for rate, seed, each in runs:
            bits = each["bits_per_byte"]
            lines.append(
                f"| {size} | {each['parameters']:,} | {rate:g} | {seed} | {each['tokens']:,} | {bits['value']:.3f} | "
                f"{bits['low']:.3f} to {bits['high']:.3f} |"
            )
    several = [runs for runs in found.values() if len(runs) > 1]
    for runs in several:
        values = [each["bits_per_byte"]["value"] for *_, each in runs]
        lines.append(f"\nStandard deviation over {len(values)} seeds: {statistics.stdev(values):.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
