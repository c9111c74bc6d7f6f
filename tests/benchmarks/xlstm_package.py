"""Logits of NX-AI's own package, as a reference of models/families/xlstm.py.

    pip install --no-deps --target FOLDER xlstm==2.0.6 mlstm_kernels==2.0.6 einops
    PYTHONPATH=.:FOLDER python -m tests.benchmarks.xlstm_package tests/golden/xlstm_package.json

writes what `xLSTMLarge` computes on the CPU in float32 with its plain kernels for weights that `drawn` makes;
tests/models/test_xlstm.py compares. The package is no dependency: its kernels are for GPUs, under a licence of their
own. With it on the path transformers would take its blocks from there, which this file does not import."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

SIZES = {"vocab_size": 24, "num_heads": 2, "num_blocks": 2}
WIDTH, TOKENS = 64, 48
EMBEDDING = {"backbone.embeddings.weight": "embedding.weight"}
"""transformers' name of the one parameter that the package calls otherwise."""


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return weights by name, each from a generator of its own: gates and norms that differ from head to head."""
    made = {}
    for number, name in enumerate(sorted(shapes)):
        generator = torch.Generator().manual_seed(number)
        shape = shapes[name]
        noise = torch.randn(shape, generator=generator)
        middle = -1.0 if "igate" in name else 2.0 if "fgate" in name else 1.0
        made[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else middle + 0.2 * noise
    return made


def ids() -> Tensor:
    """Return the tokens, (1, T)."""
    return torch.randint(0, SIZES["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(99))


def main() -> None:
    """Write the logits."""
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

    plain = {
        "chunkwise_kernel": "chunkwise--native_autograd",
        "sequence_kernel": "native_sequence__native",
        "step_kernel": "native",
        "autocast_kernel_dtype": "float32",
    }
    model = xLSTMLarge(
        xLSTMLargeConfig(embedding_dim=WIDTH, **SIZES, **plain, mode="train", chunk_size=16, return_last_states=True)
    ).float()
    inner = {outer: name for name, outer in EMBEDDING.items()}
    shapes = {inner.get(name, name): tuple(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict({EMBEDDING.get(name, name): tensor for name, tensor in drawn(shapes).items()})
    with torch.no_grad():
        logits = model(ids())
    logits = logits[0] if isinstance(logits, tuple) else logits
    Path(sys.argv[1]).write_text(json.dumps([[round(x, 7) for x in row] for row in logits[0].tolist()]) + "\n")


if __name__ == "__main__":
    main()
