"""Masked diffusion at small scale, from random weights and from a causal model, beside the causal model itself.

    python -m tests.benchmarks.diffusion --out /tmp/diffusion

The smallest model of tests/benchmarks/scratch.py with the settings of experiment=diffusion_llama, on the same documents
(../shared/data/ro_text.jsonl). The causal twin has objective=next_token and the same rows, steps and optimizer; the
adapted model begins with its weights. The tokenizer is one of task=tokenizer with a mask token, trained on the training
documents alone. From random weights there is a smaller model of both kinds, of short rows and a small vocabulary, which
leaves the frequencies of single tokens behind within minutes. The test split (task=evaluate) chooses nothing. What is
finished in --out is not run again. Prints Markdown.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.scratch import data, run

TWIN = (
    *("experiment=llama_mini_pretrain", "model.attention=sdpa", "schedule=constant", "optim.weight_decay=0"),
    *("optim.beta2=0.999", "optim.no_decay=[]", "optim.ema=0.9999"),
)
"""The causal recipe with the settings of experiment=diffusion_llama."""
ARMS = ("causal", "adapted", "small_causal", "small_scratch")
CAUSAL = ("causal", "small_causal")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, its rows and its steps."""

    steps: int
    vocab_size: int
    seq_len: int
    rows: int
    arch: dict[str, int]
    initializer_range: float
    more: tuple[str, ...] = ()


LARGE = Shape(
    700,
    vocab_size=1024,
    seq_len=256,
    rows=4,
    arch={"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 2},
    initializer_range=0.049,
)
SMALL = Shape(
    1600,
    vocab_size=384,
    seq_len=32,
    rows=64,
    arch={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2},
    initializer_range=0.1,
    more=("optim.beta2=0.98",),
)
NUM_HEADS, RATE = 4, 3e-3


def main() -> None:
    """Train the tokenizer and every model, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/diffusion"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    arguments = parser.parse_args()
    out = arguments.out
    for size in sorted({shape_of(arm).vocab_size for arm in arguments.arms}):
        if not (out / f"tokenizer{size}" / "tokenizer.json").exists():
            mask = "+task.special_tokens.mask_token='<mask>'"
            run("task=tokenizer", f"task.vocab_size={size}", mask, *data(out), f"task.folder={out}/tokenizer{size}")
    found = {arm: [measured(out, arm, seed=seed) for seed in arguments.seeds] for arm in arguments.arms}
    print(table(found, arguments.seeds))


def shape_of(arm: str) -> Shape:
    """Return the sizes of an arm's model."""
    return SMALL if arm.startswith("small_") else LARGE


def measured(out: Path, arm: str, *, seed: int) -> dict[str, Any]:
    """Train a model; return its measures on the test split, before and after."""
    name, shape = f"{arm}-{seed}", shape_of(arm)
    heads = {"num_attention_heads": NUM_HEADS, "head_dim": shape.arch["hidden_size"] // NUM_HEADS}
    arch = {**shape.arch, **heads, "vocab_size": shape.vocab_size}
    twin = out / f"causal-{seed}" / "model"
    if not (out / name / "result.json").exists():
        run(
            *(TWIN if arm in CAUSAL else ["experiment=diffusion_llama"]),
            *data(out),
            *(f"model.arch.{key}={value}" for key, value in arch.items()),
            f"+model.arch.initializer_range={shape.initializer_range}",
            *(["model.init=pretrained", f"model.path={twin}"] if arm == "adapted" else []),
            "model.dtype=float32",
            "model.remat=none",
            f"model.tokenizer_path={out}/tokenizer{shape.vocab_size}",
            f"curriculum.stages.main={{tokens_per_parameter:null,steps:{shape.steps}}}",
            f"optim.lr={RATE}",
            *shape.more,
            f"trainer={{seq_len:{shape.seq_len},global_batch_rows:{shape.rows},eval_every_steps:{shape.steps // 2},"
            "max_eval_rows:100000,loss_chunk_tokens:null}",
            "checkpoint.every_steps=0",
            "sample.max_new_tokens=0",
            "hw.runtime=eager",
            "logger=jsonl",
            f"seed={seed}",
            f"name={name}",
        )
    file = out / name / "test_results.json"
    if not file.exists():
        run("task=evaluate", f"task.run={out / name}", "hw=cpu", "hw.runtime=eager", "hw.num_threads=1")
    source = json.loads(file.read_text())["sources"]["wiki_ro"]
    stage = json.loads((out / name / "result.json").read_text())["stages"][0]
    return {"tokens": stage["tokens"], "base": source["base"], "trained": source["trained"]}


def table(found: dict[str, list[dict[str, Any]]], seeds: list[int]) -> str:
    """Return bits per byte before and after training, with the interval over documents."""
    lines = [
        "| model | seed | tokens | bits per byte, start | trained | 95 % over documents | nats a token | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in found.items():
        measure, mark = ("bits_per_byte", "") if arm in CAUSAL else ("bits_per_byte_bound", "<= ")
        for seed, each in zip(seeds, runs, strict=True):
            bits, trained = each["trained"][measure], each["trained"]
            lines.append(
                f"| {arm} | {seed} | {each['tokens']:,} | {mark}{each['base'][measure]['value']:.3f} | "
                f"{mark}{bits['value']:.3f} | {bits['low']:.3f} to {bits['high']:.3f} | "
                f"{mark}{trained['loss']['value']:.4f} | {trained['accuracy']['value']:.3f} |"
            )
        if len(runs) > 1:
            spread = statistics.stdev(each["trained"][measure]["value"] for each in runs)
            lines.append(f"| {arm}, standard deviation over {len(runs)} seeds | | | | {spread:.4f} | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
