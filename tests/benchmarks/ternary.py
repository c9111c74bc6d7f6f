"""What ternary weights cost at small scale: BitNet beside the Llama of the same sizes, in bits per byte.

    python -m tests.benchmarks.ternary --out /tmp/ternary

Three sizes of tests/benchmarks/scratch.py from scratch on real Romanian, each as it is and with model.linear=bitnet, on
the same rows in the same order. Each arm takes at each size the rate whose loss on the evaluation split is the lowest
for the first seed; the test split chooses nothing. The ternary arm has the two halves of
conf/curriculum/bitnet_two_stage.yaml: the rate falls by a third where weight decay ends. What is finished in --out is
not run again. Prints Markdown: the models, and the gap of each pair on the same test documents, as transformers
computes both, with a 95 % interval over documents.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.benchmarks.scratch import FILE, SEQ_LEN, SIZES, VOCAB_SIZE, data, run, split_texts, tested, train
from tpu_experiments.metrics.bootstrap import estimate, resampled_sums
from tpu_experiments.tasks.export.readers import TransformersModel

ARMS = ("dense", "ternary")


def main() -> None:
    """Train the tokenizer and every model, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/ternary"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.1 M", "0.2 M", "0.6 M"])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 6e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    out, steps, sizes = arguments.out, arguments.steps, arguments.sizes
    run("task=tokenizer", f"task.vocab_size={VOCAB_SIZE}", *data(out), "name=tokenizer", f"task.folder={out}/tokenizer")
    best = {}
    for size, arm in itertools.product(sizes, ARMS):
        tried = {
            rate: trained(out, size, arm=arm, rate=rate, steps=steps, seed=arguments.seeds[0])["eval_loss"]
            for rate in arguments.rates
        }
        best[size, arm] = min(tried, key=lambda rate: tried[rate])
        print(f"{size}, {arm}: {', '.join(f'{loss:.4f} at {rate:g}' for rate, loss in tried.items())}", flush=True)
    print("| size | arm | rate | seed | loss, evaluation | bits per byte, test | 95 % over documents | -1, 0, 1 |")
    print("|---|---|---|---|---|---|---|---|")
    for size, seed, arm in itertools.product(sizes, arguments.seeds, ARMS):
        result = trained(out, size, arm=arm, rate=best[size, arm], steps=steps, seed=seed)
        bits = tested(out, result)["bits_per_byte"]
        print(
            f"| {size} ({result['num_parameters']:,}) | {arm} | {best[size, arm]:g} | {seed} | "
            f"{result['eval_loss']:.4f} | "
            f"{bits['value']:.3f} | {bits['low']:.3f} to {bits['high']:.3f} | "
            f"{shares(out / result['name']) if arm == 'ternary' else ''} |",
            flush=True,
        )
    print("\n| size | seed | gap, bits per byte, test | 95 % over documents |\n|---|---|---|---|")
    for size, seed in itertools.product(sizes, arguments.seeds):
        pair = [trained(out, size, arm=arm, rate=best[size, arm], steps=steps, seed=seed)["name"] for arm in ARMS]
        sums_D3 = np.column_stack([bits_by_document(out / name / "model") for name in pair] + [bytes_by_document()])
        drawn_R3 = resampled_sums(sums_D3, num_resamples=2000, generator=np.random.default_rng(0))
        gaps = [(sums[..., 1] - sums[..., 0]) / sums[..., 2] for sums in (sums_D3.sum(0), drawn_R3)]
        found = estimate(float(gaps[0]), gaps[1], confidence=0.95, num_documents=len(sums_D3))
        print(f"| {size} | {seed} | {found.value:.3f} | {found.low:.3f} to {found.high:.3f} |", flush=True)


def bytes_by_document() -> NDArray[np.float64]:
    """Return the bytes of every test document."""
    return np.array([len(text) for text in split_texts(FILE)[1]], dtype=np.float64)


def bits_by_document(folder: Path) -> NDArray[np.float64]:
    """Return the bits of every test document under a model in transformers, in rows of the training's length."""
    model, bits = TransformersModel(str(folder), dtype=torch.float32), []
    for text in split_texts(FILE)[1]:
        parts = [part for part in torch.tensor(model.ids(text.decode())).split(SEQ_LEN) if len(part) > 1]
        nats = [-model.log_probs(part.tolist())[:-1].gather(1, part[1:, None]).sum() for part in parts]
        bits.append(float(sum(nats)) / math.log(2))
    return np.array(bits)


def trained(out: Path, size: str, *, arm: str, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train one model; return its result.json."""
    if arm == "dense":
        return train(out, size, rate=rate, steps=steps, seed=seed)
    first, second = steps // 2, steps - steps // 2
    more = ["schedule.warmup_steps=null"]
    for stage, count, peak in (("first", first, rate), ("second", second, rate / 3)):
        more.append(f"curriculum.stages.{stage}={{steps:{count},tokens_per_parameter:null,lr:{peak}}}")
    return train(out, size, rate=rate, steps=steps, seed=seed, experiment="bitnet_pretrain", kind="ternary-", more=more)


def shares(folder: Path) -> str:
    """Return the least and the most of each share over the layers, at the last record of norms."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(r for r in reversed(records) if any(key.startswith("ternary/") for key in r))
    found = []
    for name in ("minus", "zero", "plus"):
        values = [value for key, value in last.items() if key.startswith(f"ternary/{name}_")]
        found.append(f"{min(values):.3f} to {max(values):.3f}")
    return "; ".join(found)


if __name__ == "__main__":
    main()
