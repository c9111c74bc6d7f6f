"""What training through the rounding wins back: LR-QAT beside rounding alone, and beside LoRA with rounding after it.

    python -m tests.benchmarks.rounding --out /tmp/rounding

A Llama of tests/benchmarks/scratch.py, trained on real Romanian. Each way starts from it: its weights rounded (L4
search of scales); the same after more training with LoRA (merged, then rounded); and LR-QAT for as many steps on the
same rows, at the rate whose loss on the evaluation split is the lowest for the first bits (LoRA has the same choice).
LR-QAT is read by transformers from the packed integers that task=export wrote, with inputs of 8 bits where it was
trained so (`--inputs 8`; the other ways then have their layers' inputs rounded as well). Perplexities are over the
tokens of the test documents, with 95 % intervals of their ratio to the model as it is over documents. What is finished
in --out is not run again. Prints Markdown.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from tests.benchmarks.scratch import FILE, ROWS, SEQ_LEN, VOCAB_SIZE, data, run, split_texts, train
from tpu_experiments.config.model_schema import ALL_LINEAR, is_target
from tpu_experiments.models.adapters.low_rank_qat import EXPONENT, rounded_tokens
from tpu_experiments.quantisation.grid import Grid
from tpu_experiments.quantisation.parts import rounds_inputs

SIZE, RATE, RANK = "0.6 M", 3e-3, 8
RESAMPLES = 2000
Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Nats and tokens of every document."""


def main() -> None:
    """Train the model, start every way from it, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/rounding"))
    parser.add_argument("--steps", type=int, default=2400, help="of the model")
    parser.add_argument("--more", type=int, default=600, help="steps of LR-QAT and of LoRA")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--grids", nargs="+", default=["4:0", "4:64", "3:0", "2:0"], help="bits:group")
    parser.add_argument("--inputs", type=int, nargs="+", choices=[16, 8], default=[16], help="bits, 16 for as they are")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    out, steps, more = arguments.out, arguments.steps, arguments.more
    run("task=tokenizer", f"task.vocab_size={VOCAB_SIZE}", *data(out), "name=tokenizer", f"task.folder={out}/tokenizer")
    grids = [
        (int(bits), int(group), inputs)
        for inputs in arguments.inputs
        for bits, group in (grid.split(":") for grid in arguments.grids)
    ]
    print("| seed | bits, weights a scale, inputs | way | perplexity | ratio to the model | 95 % over documents |")
    print("|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        base = out / str(train(out, SIZE, rate=RATE, steps=steps, seed=seed)["name"])
        best = {
            kind: min(
                arguments.rates,
                key=lambda rate: continued(out, base, kind=kind, grid=grids[0], rate=rate, steps=more, seed=seed)[
                    "eval_loss"
                ],
            )
            for kind in ("lora", "lr_qat")
        }
        print(f"<!-- seed {seed}: rates {best} -->", flush=True)
        whole = score(base / "model")
        tuned = exported(
            out, continued(out, base, kind="lora", grid=None, rate=best["lora"], steps=more, seed=seed), "merged"
        )
        row(seed, "float", "the model", whole, whole)
        row(seed, "float", f"{more} steps of LoRA", score(tuned), whole)
        for grid in grids:
            shown = f"{grid[0]}, {grid[1] or 'a row'}, {'8 bits' if grid[2] == 8 else 'as they are'}"
            row(seed, shown, "rounded", score(base / "model", grid=grid), whole)
            row(seed, shown, f"{more} steps of LoRA, then rounded", score(tuned, grid=grid), whole)
            result = continued(out, base, kind="lr_qat", grid=grid, rate=best["lr_qat"], steps=more, seed=seed)
            row(seed, shown, f"{more} steps of LR-QAT", score(exported(out, result, "lr_qat")), whole)


def continued(
    out: Path, base: Path, *, kind: str, grid: tuple[int, int, int] | None, rate: float, steps: int, seed: int
) -> dict[str, Any]:
    """Train adapters on a model; return result.json."""
    bits, group, inputs = grid or (4, 0, 16)
    activations = "int8" if inputs == 8 else "as_they_are"
    rounded = [
        f"model.linear_bits={bits}",
        f"model.linear_group={group}",
        f"model.linear_activations={activations}",
    ]
    name = f"{base.name}-{kind}-{rate:g}-{steps}" + (f"-{bits}-{group}-{inputs}" if kind == "lr_qat" else "")
    file = out / name / "result.json"
    if not file.exists():
        run(
            "experiment=lr_qat",
            "model=llama_mini",
            *data(out),
            f"model.path={base}/model",
            f"model.tokenizer_path={out}/tokenizer",
            *(rounded if kind == "lr_qat" else ["model.linear=plain"]),
            "model.dtype=float32",
            "model.remat=none",
            f"lora.r={RANK}",
            # The unit of A and B is a step between integers in one, and a weight in the other.
            f"lora.alpha={8 * RANK if kind == 'lr_qat' else RANK}",
            f"curriculum.stages.main.steps={steps}",
            "schedule.warmup_steps=60",
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


def exported(out: Path, result: dict[str, Any], form: str) -> Path:
    """Write a form of a run; return its folder."""
    folder = out / str(result["name"])
    if not (folder / "export" / form / "export.json").exists():
        run("task=export", f"task.run={folder}", f"task.forms=[{form}]", "hw=cpu", f"output_dir={out}")
    return folder / "export" / form


@torch.no_grad()
def score(folder: Path, *, grid: tuple[int, int, int] | None = None) -> Sums:
    """Return the sums of every test document under the model in a folder, in float32, its layers rounded to a grid.

    A document is scored in rows of the training's length.
    """
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config")
    # Decoded at once where that leaves nothing out.
    decode = settings and not rounds_inputs(settings)
    options: dict[str, Any] = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if decode else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, **options).eval()
    if grid is not None:
        bits, group, inputs = grid
        made = Grid(bits, group, EXPONENT)
        for name, part in model.named_modules():
            if isinstance(part, torch.nn.Linear) and is_target(name, ALL_LINEAR):
                scales = made.scales(part.weight)
                part.weight.copy_(made.decode(made.codes(part.weight, scales), scales))
                if inputs == 8:
                    part.register_forward_pre_hook(lambda _, given: (rounded_tokens(given[0]),))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    nats, tokens = [], []
    for text in split_texts(FILE)[1]:
        ids = torch.tensor(tokenizer(text.decode()).input_ids)
        parts = [part for part in ids.split(SEQ_LEN) if len(part) > 1]
        found = [
            torch.nn.functional.cross_entropy(model(p[None]).logits[0, :-1], p[1:], reduction="sum") for p in parts
        ]
        nats.append(float(sum(found)))
        tokens.append(sum(len(p) - 1 for p in parts))
    return np.array(nats), np.array(tokens, dtype=np.float64)


def row(seed: int, shown: str, way: str, sums: Sums, whole: Sums) -> None:
    """Print a line of the table: perplexity, and its ratio to that of the model as it is, paired over documents."""
    (nats, tokens), (others, _) = sums, whole
    drawn = np.random.default_rng(0).integers(0, len(nats), (RESAMPLES, len(nats)))
    ratios = np.exp((nats[drawn].sum(1) - others[drawn].sum(1)) / tokens[drawn].sum(1))
    low, high = np.quantile(ratios, [0.025, 0.975])
    ratio = math.exp((nats.sum() - others.sum()) / tokens.sum())
    own = math.exp(nats.sum() / tokens.sum())
    print(f"| {seed} | {shown} | {way} | {own:.3f} | {ratio:.4f} | {low:.4f} to {high:.4f} |", flush=True)


if __name__ == "__main__":
    main()
