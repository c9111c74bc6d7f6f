"""Associative recall: an xLSTM against the same model with open gates, which is linear attention.

    python -m tests.benchmarks.recall --seeds 0 1 2

A row is N pairs of a key and a value, drawn anew for each row, and then every key once more in another order; after
each, its value is to be predicted (multi-query associative recall, arXiv 2312.04927). What is learnt is the rule, since
no pair occurs twice but by chance. The linear model has the same config and start, but its forget gate leaves
everything and its input gate takes every token alike (arXiv 2006.16236), so that it cannot tell which token came
directly before another. Prints a line for every few hundred steps, and then the table."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import xLSTMConfig

from tpu_experiments.models.xlstm import MLSTMLayer, xLSTMForCausalLM

KEYS, VALUES = 32, 32
"""Tokens of each kind; a row draws its keys without repetition."""


def rows_of(count: int, *, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (count, 4 * pairs), the places of the questions, and the answers (count, pairs)."""
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(KEYS, KEYS + VALUES, (count, pairs), generator=generator)
    order = torch.rand(count, pairs, generator=generator).argsort(1)
    answers = values.gather(1, order)
    stored = torch.stack([keys, values], 2).flatten(1)
    asked = torch.stack([keys.gather(1, order), answers], 2).flatten(1)
    return torch.cat([stored, asked], 1), torch.arange(2 * pairs, 4 * pairs, 2), answers


def open_gates(model: xLSTMForCausalLM) -> None:
    """Make a model linear: the forget gate leaves all, the input gate takes all."""
    for part in model.modules():
        if isinstance(part, MLSTMLayer):
            part._gate = lambda layer, hidden, own=part: torch.full(  # type: ignore[method-assign, misc]
                (hidden.shape[0], own.num_heads, hidden.shape[1]), 0.0 if layer is own.igate_preact else 100.0
            )


def trained(kind: str, *, seed: int, pairs: int, steps: int, rate: float, width: int) -> float:
    """Train one model and return the share of right answers of 512 new rows."""
    torch.manual_seed(seed)
    config = xLSTMConfig(
        vocab_size=KEYS + VALUES, hidden_size=width, num_hidden_layers=2, num_heads=2, pad_token_id=None
    )
    model = xLSTMForCausalLM(config)
    if kind == "linear":
        open_gates(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    begin = time.perf_counter()
    for step in range(steps):
        ids, places, answers = rows_of(64, pairs=pairs, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 100, (steps - step) / (0.5 * steps), 1)
        loss = F.cross_entropy(model(input_ids=ids).logits[:, places].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if (step + 1) % 250 == 0:
            print(
                f"{kind} seed {seed} step {step + 1} loss {loss.item():.4f} {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
    with torch.no_grad():
        ids, places, answers = rows_of(512, pairs=pairs, generator=torch.Generator().manual_seed(seed + 10_000))
        return float((model(input_ids=ids).logits[:, places].argmax(-1) == answers).float().mean())


def main() -> None:
    """Train both models for each seed and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", default=["xlstm", "linear"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in args.kinds:
        for seed in args.seeds:
            share = trained(kind, seed=seed, pairs=args.pairs, steps=args.steps, rate=args.rate, width=args.width)
            print(f"| {kind} | {seed} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
