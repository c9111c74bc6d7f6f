"""What the feed costs and gives: ms per step with `put` and with the feed, and rows/s of the loader alone.

    python -m tests.benchmarks.feed [--steps 60] [--rows 20000]

The steps are those of a tiny Qwen2 (LoRA r=8, float32, 16 rows of 64 tokens, one thread), assembled from rows on disk.
The loader alone assembles batches of 64 rows of 1,024 tokens from a RowStore in a random order.

The need: peak tokens/s of the largest slice on the smallest model, v6e-8 on Gemma 3 270M. A chip does 918 TFLOP/s in
bf16 (conf/hw/v6e8.yaml) and a token costs 6 * 0.27e9 FLOP (forward 2 and backward 4 per parameter); at 40 % of the
peak 8 chips take 8 * 918e12 * 0.4 / (6 * 0.27e9) = 1.81 million tokens/s, 1,771 rows/s.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

NEEDED_TOKENS_PER_SECOND = 8 * 918e12 * 0.4 / (6 * 0.27e9)
WARM_UP_STEPS = 10
STEP_ROWS, STEP_LEN = 16, 64
LOADER_ROWS, LOADER_LEN = 64, 1024
VOCABULARY = {"16-bit ids": 2**16, "32-bit ids": 262144}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--case", choices=("eager", "xla"))
    args = parser.parse_args()
    if args.case:
        print(json.dumps(step_milliseconds(args.case, num_steps=args.steps)))
        return
    print(f"| runtime | put | feed | waiting for a batch, put | feed |  (ms per step, {STEP_ROWS} x {STEP_LEN})")
    for runtime in ("eager", "xla"):
        command = [sys.executable, "-m", "tests.benchmarks.feed", "--case", runtime, "--steps", str(args.steps)]
        env = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"| {runtime} | " + " | ".join(f"{value:.2f}" for value in found.values()), flush=True)
    print("\n| loader alone | rows/s | tokens/s | times the need of a v6e-8 on 270M |")
    for name, vocab_size in VOCABULARY.items():
        rows = loader_rows_per_second(args.rows, vocab_size=vocab_size)
        tokens = rows * LOADER_LEN
        print(f"| {name} | {rows:,.0f} | {tokens:,.0f} | {tokens / NEEDED_TOKENS_PER_SECOND:.1f} |", flush=True)


def step_milliseconds(kind: str, *, num_steps: int) -> dict[str, float]:
    """Median ms of a step and of its wait for the batch; `put` and the feed take turns of 15 steps."""
    from hydra import compose, initialize_config_dir

    from tests.training.runs import REPOSITORY
    from tests.training.tiny import Run
    from tpu_experiments.config.compose import to_config
    from tpu_experiments.config.schema import register
    from tpu_experiments.runtime.processes.launch import make_runtime

    register()
    overrides = ["model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", f"hw.runtime={kind}"]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        config = to_config(compose("config", overrides=[*overrides, "hw.num_threads=1"]))
    runtime = make_runtime(config)
    run = Run(config, runtime)
    times: dict[str, list[float]] = {f"{what} {way}": [] for what in ("step", "wait") for way in ("put", "feed")}
    with tempfile.TemporaryDirectory() as folder:
        rows = stage_on_disk(folder, num_rows=2000, seq_len=STEP_LEN, vocab_size=4000)
        run_steps(run, sent_now(runtime, rows), num_steps=WARM_UP_STEPS)
        with runtime.feed(step_inputs(rows), rows_dim=1, settings=config.loader) as feed:
            ways: dict[str, Iterator[Any]] = {"put": sent_now(runtime, rows), "feed": feed}
            for _, way in itertools.product(range(-(-num_steps // 15)), ways):
                steps, waits = run_steps(run, ways[way], num_steps=15)
                times[f"step {way}"] += steps
                times[f"wait {way}"] += waits
    return {name: 1000 * float(np.median(seconds)) for name, seconds in times.items()}


def run_steps(run: Any, batches: Iterator[Any], *, num_steps: int) -> tuple[list[float], list[float]]:
    """Mean seconds per step, once, and the seconds that each batch was waited for."""
    waits = []
    started = time.perf_counter()
    for _ in range(num_steps):
        asked = time.perf_counter()
        _, batch = next(batches)
        waits.append(time.perf_counter() - asked)
        run.program(batch)
    run.runtime.wait()
    return [(time.perf_counter() - started) / num_steps], waits


def step_inputs(rows: Any) -> Iterator[Any]:
    """Host batches, as `training.inputs.step_batches` makes them."""
    import torch

    from tpu_experiments.training.evaluation import host_tensors

    for step in itertools.count():
        tensors = host_tensors(rows.batch(step, global_rows=STEP_ROWS))
        yield step, {name: t[None] for name, t in tensors.items()} | {"lr": torch.tensor([1e-3])}


def sent_now(runtime: Any, rows: Any) -> Iterator[Any]:
    """Without a feed: a batch is assembled and sent when it is asked for."""
    return ((step, runtime.put(batch, rows_dim=1)) for step, batch in step_inputs(rows))


def loader_rows_per_second(num_rows: int, *, vocab_size: int) -> float:
    """Rows in batches of arrays per second, read in a random order."""
    with tempfile.TemporaryDirectory() as folder:
        rows = stage_on_disk(folder, num_rows=num_rows, seq_len=LOADER_LEN, vocab_size=vocab_size)
        rows.batch(0, global_rows=LOADER_ROWS)
        num_steps = num_rows // LOADER_ROWS
        return best_of(3, lambda: [rows.batch(i, global_rows=LOADER_ROWS) for i in range(num_steps)]) * (
            num_steps * LOADER_ROWS
        )


def best_of(times: int, work: Callable[[], object]) -> float:
    """Runs per second of the fastest: the machine may be shared."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1 / min(seconds)


def stage_on_disk(folder: str, *, num_rows: int, seq_len: int, vocab_size: int) -> Any:
    """Rows of four segments in shards of 4,096 rows."""
    from tpu_experiments.data.batches import StageRows
    from tpu_experiments.data.rows import Rows
    from tpu_experiments.data.store.shards import RowStore, row_dtype, write_shard

    generator = np.random.default_rng(0)
    dtype, shards = row_dtype(seq_len, vocab_size=vocab_size), []
    segment_T = np.arange(seq_len, dtype=np.int32) // (seq_len // 4) + 1
    position_T = np.arange(seq_len, dtype=np.int32) % (seq_len // 4)
    for first in range(0, num_rows, 4096):
        shape = (min(4096, num_rows - first), seq_len)
        ids_NT = generator.integers(5, min(vocab_size, 4000), shape, dtype=np.int32)
        learn_NT = np.broadcast_to(position_T > 0, shape)
        rows = Rows(ids_NT, learn_NT, np.broadcast_to(position_T, shape), np.broadcast_to(segment_T, shape))
        name = f"{len(shards):05d}.npy"
        write_shard(os.path.join(folder, name), rows, dtype=dtype)
        shards.append((name, shape[0]))
    store = RowStore(folder, shards=shards, seq_len=seq_len, pad_id=0, cache=None)
    return StageRows([store], names=["synthetic"], seed=0, stage_index=0)


if __name__ == "__main__":
    main()
