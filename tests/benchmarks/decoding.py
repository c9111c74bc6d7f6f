"""Planned time of one token of the decoder of task=generate, and of reading the prompts, by the TPU's compiler.

    python -m tests.benchmarks.decoding                  # the jobs of the table in LOG.md, some minutes
    python -m tests.benchmarks.decoding "model=gemma3_270m hw=v5e1" --rows 32 --prompt 255 --new 256

Needs libtpu, and no weights. The floor is the time to read the weights once and the cache once from HBM, of one chip.
Every token is drawn from the whole vocabulary, at a temperature that is an input of the program.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from hydra import compose, initialize_config_dir

from tpu_experiments.config.compose import CONF, to_config
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import register
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.planning.compiled import Compilers
from tpu_experiments.planning.hlo.program import read_program
from tpu_experiments.runtime.tracing import tracing_runtime
from tpu_experiments.tasks.plan.decoding import lowered_decoding
from tpu_experiments.tasks.plan.formulas import shapes_source

JOBS = (
    ("model=qwen05b hw=v5e1", 64, 512, 511),
    ("model=qwen05b hw=v5e8 sharding=replicated", 256, 255, 256),
    ("model=gemma3_270m hw=v5e1", 32, 255, 256),
)
COLUMNS = ("job", "rows", "slots", "ms a token", "floor", "tokens/s", "prompts, ms", "GiB a chip")


def line_of(words: str, rows: int, prompt: int, new: int, *, per_call: int, folder: str) -> list[str]:
    """Lower and compile both programs of a job; returns a line of the table."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_config(compose("config", overrides=["data=sample_text", *words.split()]))
    runtime = tracing_runtime(config.hw, sharding=config.sharding)
    with torch.no_grad():
        module = build_frozen(shapes_source(config), lora=LoraConfig(r=0), trained={}, place=runtime.place)
        choice = ChoiceConfig(do_sample=True, top_k=0)
        how = {"num_rows": rows, "max_new_tokens": new, "tokens_per_call": per_call, "seed": 0}
        decoder = Decoder(module, runtime=runtime, choice=choice, **how)
        lowered = lowered_decoding(decoder, length=prompt, with_shape=1)
    with Compilers(1) as compilers:
        read, written = (compilers.submit(each, hw=config.hw, folder=folder).result() for each in lowered)
    clock = config.hw.chip.clock_ghz * 1e6
    reading, writing = (read_program(each.optimized_hlo()).cycles / clock for each in (read, written))
    arch = module.config
    width = getattr(arch, "head_dim", None) or arch.hidden_size // arch.num_attention_heads
    slots = prompt + new
    cache = 2 * arch.num_hidden_layers * arch.num_key_value_heads * width * slots * rows / config.hw.num_devices
    num_bytes = 2 * (cache + sum(each.numel() for each in module.parameters()))
    floor = num_bytes / config.hw.chip.hbm_gb_per_second / 1e6
    token = writing / per_call
    cells = [words, str(rows), f"{slots:,}", f"{token:.2f}", f"{floor:.2f}", f"{1000 * rows / token:,.0f}"]
    return [*cells, f"{reading:.1f}", f"{max(read.memory.total, written.memory.total) / 2**30:.2f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="?")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=511)
    parser.add_argument("--per-call", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("outputs/decoding").absolute())
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    if given.words:
        register()
        job = given.words, given.rows, given.prompt, given.new
        cells = line_of(*job, per_call=given.per_call, folder=str(given.output.absolute()))
        print(f"| {' | '.join(cells)} |", flush=True)
        return
    for words, *numbers in JOBS:  # each in a process of its own: torch_xla is of one machine in each
        sizes = [word for pair in zip(("--rows", "--prompt", "--new"), map(str, numbers), strict=True) for word in pair]
        command = [sys.executable, "-m", "tests.benchmarks.decoding", words, *sizes, "--output", str(given.output)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
