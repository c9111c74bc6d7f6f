"""Peak memory and CPU time of a step in plain torch on the CPU, for each `model.remat`.

python -m tests.benchmarks.recomputed; memory is that of all tensors alive at once, beyond those alive before the step.
"""

import argparse
import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.config.composing import composed
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.model_schema import SAVED
from tpu_experiments.runtime.eager import EagerRuntime

WIDTHS = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8}
MIB = 2**20


class LiveTensors(TorchDispatchMode):
    """Count the bytes of storages that operations inside the block create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known | given:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes


def measured(overrides: list[str], *, rows: int, seq_len: int, steps: int) -> tuple[float, float, list[float]]:
    """Peak MiB of a step, CPU seconds of a step, and the losses."""
    arch = [f"model.tiny_arch.{key}={value}" for key, value in WIDTHS.items()]
    tiny = ["model=mistral7b", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager", "lora=all_linear_r16"]
    config = composed(*tiny, *arch, *overrides)
    run = Run(config, EagerRuntime(config.hw))
    run.model.module.train()
    batches = [random_batch(i, rows=rows, seq_len=seq_len) for i in range(steps + 1)]
    live = LiveTensors()
    with live:
        losses = run.losses(batches[:1])
    start = time.process_time()
    losses += run.losses(batches[1:])
    return live.peak / MIB, (time.process_time() - start) / steps, losses


def main() -> None:
    """Print a table, one line per policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    print("| base | remat | peak of a step, MiB | CPU seconds of a step | last loss |\n|---|---|---|---|---|")
    for base in ("dense", "nf4"):
        for remat in ("none", *SAVED):
            overrides = [f"model.base={base}", f"model.remat={remat}"]
            peak, seconds, losses = measured(overrides, rows=given.rows, seq_len=given.seq_len, steps=given.steps)
            print(f"| {base} | {remat} | {peak:,.1f} | {seconds:.2f} | {losses[-1]!r} |", flush=True)


if __name__ == "__main__":
    main()
