"""Tokens per second of task=generate's decoder beside transformers' generate, on this machine's CPU.

    OMP_NUM_THREADS=2 python -m tests.benchmarks.generation model=tiny
    OMP_NUM_THREADS=2 python -m tests.benchmarks.generation --rows 1 --new 17 model=qwen05b model.init=random \\
        model.dtype=float32

    OMP_NUM_THREADS=1 python -m tests.benchmarks.generation --rows 32 --cpu model=tiny

Every way writes the same number of tokens after the same prompts, once to warm up and then twice; the faster counts.
`--cpu` counts the process's CPU time, which other work on the machine changes least. Another version of the package is
measured by a copy of this file in its folder.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
from hydra import compose, initialize_config_dir

from tpu_experiments.config.compose import to_config
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import register
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.processes.launch import make_runtime

PROMPT = 100
THREADS = os.environ.get("OMP_NUM_THREADS", "2")


def main() -> None:
    """Print a line of Markdown for every way and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="CPU time, with OMP_NUM_THREADS=1")
    chosen, overrides = parser.parse_known_args()
    torch_xla.device()
    register()
    print("| rows | way | tokens/s | first call, s |\n|---|---|---|---|")
    for rows in chosen.rows:
        ids = torch.randint(10, 4000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
        for name, write in ways(ids, new=chosen.new, overrides=overrides).items():
            clock = time.process_time if chosen.cpu else time.perf_counter
            first, *others = [seconds_of(write, clock=clock) for _ in range(3)]
            print(f"| {rows} | {name} | {rows * chosen.new / min(others):,.1f} | {first:.1f} |", flush=True)


def ways(ids: torch.Tensor, *, new: int, overrides: list[str]) -> dict[str, Callable[[], Any]]:
    """What is compared, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for runtime in ("xla", "eager"):
        module, decoder = decoder_of(overrides, runtime, rows=len(ids), new=new)

        def write(decoder: Decoder = decoder) -> None:
            for _ in decoder.stream(ids.tolist(), draws=range(len(ids)), bucket=128):
                pass

        found[f"task=generate, hw.runtime={runtime}"] = write
    module.config._attn_implementation = "sdpa"
    module.generation_config.eos_token_id = None  # type: ignore[union-attr]
    given = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    generate: Any = module.generate
    found["transformers generate"] = lambda: generate(ids, use_cache=True, **given)
    found["transformers generate, no cache"] = lambda: generate(ids, use_cache=False, **given)
    return found


def decoder_of(overrides: list[str], runtime: str, *, rows: int, new: int) -> tuple[torch.nn.Module, Decoder]:
    """The base model on a runtime."""
    with initialize_config_dir(str(Path(__file__).parents[2] / "conf"), version_base="1.3"):
        own = [f"hw.runtime={runtime}", f"hw.num_threads={THREADS}"]
        config = to_config(compose("config", overrides=["model=tiny", *overrides, *own]))
    made = make_runtime(config)
    source = HuggingFaceModel(config.model, seed=0)
    module = build_frozen(source, lora=LoraConfig(r=0), trained={}, place=made.place)
    settings = {"num_rows": rows, "max_new_tokens": new, "tokens_per_call": 8, "seed": 0}
    return module, Decoder(module, runtime=made, choice=ChoiceConfig(), **settings)  # type: ignore[arg-type]


def seconds_of(write: Callable[[], Any], *, clock: Callable[[], float]) -> float:
    """Time of one call."""
    started = clock()
    write()
    return clock() - started


if __name__ == "__main__":
    main()
