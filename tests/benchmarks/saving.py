"""What a checkpoint costs: adapters of Mistral 7B's sizes, r=16 on seven projections, on torch_xla's CPU device.

    python -m tests.benchmarks.saving [--rounds 5] [--every 8] [--folder /tmp]

The base is nothing: the adapters are made directly, in stacks of 32 layers as a run holds them, with AdamW's two
moments. A step is the update of all of them and some matrix products. Blocks of steps without a save, with one that the
loop waits for and with one in the background take turns. The parts of one save are timed alone; memory is what the
process holds resident above the moment before the save.
"""

import argparse
import gc
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from tests.config.composing import composed
from tpu_experiments.checkpoint import store
from tpu_experiments.checkpoint.manifest import COMMIT
from tpu_experiments.checkpoint.progress import Progress
from tpu_experiments.checkpoint.proof import InitialTensors, LossComparison
from tpu_experiments.checkpoint.saver import Saver
from tpu_experiments.checkpoint.state import PARAMETERS, Snapshot, snapshot
from tpu_experiments.config.schema import CheckpointConfig
from tpu_experiments.models.adapters.lora import fingerprints
from tpu_experiments.models.sources.build import return_freed_memory
from tpu_experiments.storage.spool import Spool

LAYERS, RANK, HIDDEN, KEY_VALUE, MLP = 32, 16, 4096, 1024, 14336
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEY_VALUE, HIDDEN),
    "self_attn.v_proj": (KEY_VALUE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
WORK = 2048
"""Rows and columns of the matrices whose products stand for the model."""


class Job:
    """The adapters on the device, and a step that changes them all."""

    def __init__(self, runtime: Any, *, num_products: int) -> None:
        self.runtime, self.num_products = runtime, num_products
        self.marks: dict[str, str] = {}
        self.parameters: dict[str, Tensor] = {}
        for name, (out, into) in SHAPES.items():
            for kind, shape in (("lora_A", (LAYERS, RANK, into)), ("lora_B", (LAYERS, out, RANK))):
                full = f"model.layers.0:{LAYERS}:1.{name}.{kind}"
                values = torch.randn(shape) if kind == "lora_A" else torch.zeros(shape)
                self.marks |= fingerprints(full, values)
                self.parameters[full] = runtime.place(values, name=full)
        self.state = {
            name: {slot: runtime.zeros(t.shape, name=name) for slot in ("mean", "square")}
            for name, t in self.parameters.items()
        }
        self.work = runtime.place(torch.randn(WORK, WORK) / WORK**0.5, name="work")
        self.progress = Progress(peak_lr=1e-4)
        self.program = runtime.program(self.step, name="train", held=self.held)

    def held(self) -> dict[str, Tensor]:
        """All that a step changes."""
        slots = {f"{n}/{slot}": t for n, slots in self.state.items() for slot, t in slots.items()}
        return {**self.parameters, **slots, "work": self.work}

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """AdamW with a made-up gradient, and the products."""
        with torch.no_grad():
            product = self.work
            for _ in range(self.num_products):
                product = product @ self.work
            for name, p in self.parameters.items():
                slots = self.state[name]
                gradient = p * 1e-3 + batch["lr"]
                slots["mean"].copy_(0.9 * slots["mean"] + 0.1 * gradient)
                slots["square"].copy_(0.95 * slots["square"] + 0.05 * gradient.square())
                p.copy_(p - batch["lr"] * slots["mean"] / (slots["square"].sqrt() + 1e-8))
            return product.sum()

    def queue_step(self) -> None:
        """One step, waited for."""
        self.program(self.runtime.put({"lr": torch.tensor([1e-4])}, rows_dim=-1))
        self.runtime.wait()
        self.progress.step += 1

    def copy(self) -> Snapshot:
        """What a checkpoint holds, on the host."""
        return self.live().copied()

    def live(self) -> Snapshot:
        """The same where it lies."""
        return snapshot(self.progress, parameters=self.parameters, state=self.state)

    def saver(self, folder: str, **settings: Any) -> Saver:
        """With nothing to answer: what that costs, the main job's log tells."""
        nothing: Any = None
        loss_comparison = LossComparison(nothing, None, runtime=self.runtime, parameters=self.parameters)
        config = CheckpointConfig(**settings)
        spool = Spool(folder, key="saving", marker=COMMIT)
        return Saver(
            config, spool, runtime=self.runtime, start=InitialTensors(self.marks), loss_comparison=loss_comparison
        )


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--products", type=int, default=4)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    os.environ["PJRT_DEVICE"] = "CPU"
    config = composed()
    from tpu_experiments.runtime.xla.device import XlaRuntime

    job = Job(XlaRuntime(config.hw, sharding=config.sharding, trace_every=50), num_products=args.products)
    for _ in range(5):
        job.queue_step()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        parts(job, folder)
        steps(job, folder, rounds=args.rounds, every=args.every)
    finally:
        shutil.rmtree(folder)


def parts(job: Job, folder: str) -> None:
    """One save, piece by piece."""
    before = trimmed()
    rows: list[tuple[str, float, float]] = []

    def timed(name: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        with peak_above(before) as peak:
            result = action()
        rows.append((name, time.perf_counter() - started, peak[0]))
        return result

    copy = timed("copy to the host", job.copy)
    return_freed_memory()
    draft = store.begin(folder, step=copy.progress.step, progress=copy.progress.to_dict())
    for group, tensors in copy.groups.items():
        file = f"{group}.safetensors"
        timed(f"write {group} ({sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB)",
              lambda file=file, tensors=tensors: store.add_tensors(draft, file, tensors))  # fmt: skip
        found = timed(f"read {group} back, compare", lambda file=file, tensors=tensors: store.read_tensors(
            draft, file, tensors))  # fmt: skip
        if group == PARAMETERS:
            timed("differs from its start, adds something", lambda found=found: InitialTensors(job.marks).verify(
                found, copy.progress))  # fmt: skip
        del found
    store.commit(draft, proof={})
    size = sum(t.nbytes for tensors in copy.groups.values() for t in tensors.values())
    print(f"\none save: {draft.num_bytes:,} bytes written, {size:,} of them tensors")
    print("\n| part | s | GB above before |\n|---|---|---|")
    for name, seconds, peak in rows:
        print(f"| {name} | {seconds:.2f} | {peak / 1e9:.2f} |")


def steps(job: Job, folder: str, *, rounds: int, every: int) -> None:
    """Blocks of steps in turns: without a save, after one in front, after one that goes on in the background."""
    savers = {"no save": None, "in front": job.saver(folder, background=False), "in the background": job.saver(folder)}
    blocks: dict[str, list[float]] = {name: [] for name in savers}
    in_saves: dict[str, list[float]] = {name: [] for name in savers}
    peaks = dict.fromkeys(savers, 0)
    for _ in range(rounds):
        for name, saver in savers.items():
            before, started = trimmed(), time.perf_counter()
            with peak_above(before) as peak:
                if saver is not None:
                    saver._has_compared = True  # the first is like the others
                    saver.save(job.live, step=job.progress.step, is_interval=True)
                in_saves[name].append(time.perf_counter() - started)
                for _ in range(every):
                    job.queue_step()
                blocks[name].append(time.perf_counter() - started)
                if saver is not None:
                    saver.join()
            peaks[name] = max(peaks[name], peak[0])
    print(f"\n| {every} steps, median of {rounds} | s | of it in the save, s | peak GB above before |")
    print("|---|---|---|---|")
    for name, seconds in blocks.items():
        median, inside = statistics.median(seconds), statistics.median(in_saves[name])
        print(f"| {name} | {median:.2f} | {inside:.2f} | {peaks[name] / 1e9:.2f} |", flush=True)


def trimmed() -> int:
    """Resident bytes, with what is freed given back to the system first."""
    gc.collect()
    return_freed_memory()
    return int(psutil.Process().memory_info().rss)


@contextmanager
def peak_above(before: int) -> Iterator[list[int]]:
    """The largest resident size inside, less `before`, sampled every 5 ms."""
    peak, stop, process = [0], threading.Event(), psutil.Process()

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak[0] = max(peak[0], process.memory_info().rss - before)


if __name__ == "__main__":
    main()
