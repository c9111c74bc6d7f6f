"""Recall of what was written last: an xLSTM against the same model with open gates, which is linear attention.

    python -m tests.benchmarks.recall --seeds 0 1 2

A row writes values under keys, 96 times, one token for each pair of a key and a value, so that a key of eight is
written twelve times on average; then every key is asked for once, in random order, and the value that was written under
it last is to be predicted. Rows are drawn anew for each step: what is learnt is the rule. The linear model has the same
config and start, but its forget gate leaves everything and its input gate takes every token alike (arXiv 2006.16236).
Prints a line for every few hundred steps, and then the share of right answers in 512 new rows."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import xLSTMConfig

from tpu_experiments.models.families.xlstm import MLSTMLayer, xLSTMForCausalLM

KEYS, VALUES, WRITES = 8, 8, 96
OPEN = {"igate_preact": 0.0, "fgate_preact": 100.0}
"""Gates before their activations: exp(0) and sigmoid(100) are 1."""


def rows_of(count: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (count, WRITES + KEYS), and answers and guesses by frequency for the last KEYS tokens (count, KEYS).

    The ids of a pair are KEYS * VALUES numbers, those of questions follow. A guess is the value that was written most
    often under the key, the best rule that knows no order.
    """
    keys = torch.randint(0, KEYS, (count, WRITES), generator=generator)
    values = torch.randint(0, VALUES, (count, WRITES), generator=generator)
    asked = torch.rand(count, KEYS, generator=generator).argsort(1)
    is_own = asked[:, :, None] == keys[:, None]  # (count, KEYS, WRITES)
    last = (is_own * torch.arange(1, WRITES + 1)).argmax(-1)
    often = (is_own[..., None] * F.one_hot(values, VALUES)[:, None]).sum(2).argmax(-1)
    ids = torch.cat([keys * VALUES + values, KEYS * VALUES + asked], 1)
    # A key that was never written has no answer.
    return ids, torch.where(is_own.any(-1), values.gather(1, last), -100), often


def open_gates(model: xLSTMForCausalLM) -> None:
    """Make a model linear: the forget gate leaves everything, the input gate takes every token alike."""
    for layer in model.modules():
        if isinstance(layer, MLSTMLayer):
            for name, value in OPEN.items():
                gate = layer.get_submodule(name)
                gate.register_forward_hook(lambda _part, _inputs, out, value=value: torch.full_like(out, value))
            layer.cap = 1e6


def trained(kind: str, *, seed: int, steps: int, rate: float, width: int) -> tuple[float, float]:
    """Train one model; return the shares of right answers and of right guesses by frequency."""
    torch.manual_seed(seed)
    config = xLSTMConfig(
        vocab_size=KEYS * VALUES + KEYS, hidden_size=width, num_hidden_layers=2, num_heads=2, pad_token_id=None
    )
    model = xLSTMForCausalLM(config)
    if kind == "linear":
        open_gates(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    begin = time.process_time()
    for step in range(steps):
        ids, answers, _ = rows_of(64, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 50, 2 * (steps - step) / steps, 1)
        logits = model(input_ids=ids).logits[:, WRITES:, :VALUES]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if (step + 1) % 250 == 0:
            seconds = time.process_time() - begin
            print(f"{kind} seed {seed} step {step + 1} loss {loss.item():.4f} {seconds:.0f} s of CPU", flush=True)
    with torch.no_grad():
        ids, answers, often = rows_of(512, generator=torch.Generator().manual_seed(seed + 10_000))
        asked = answers >= 0
        chosen = model(input_ids=ids).logits[:, WRITES:, :VALUES].argmax(-1)
        return tuple(float((each == answers)[asked].float().mean()) for each in (chosen, often))  # type: ignore[return-value]


def main() -> None:
    """Train both models for each seed and print a line of the table for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", default=["xlstm", "linear"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in args.kinds:
        for seed in args.seeds:
            right, guessed = trained(kind, seed=seed, steps=args.steps, rate=args.rate, width=args.width)
            print(f"| {kind} | {seed} | {right:.3f} | {guessed:.3f} |", flush=True)


if __name__ == "__main__":
    main()
