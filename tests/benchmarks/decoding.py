"""Planned speed of the decoder's programs on a TPU, by its compiler: milliseconds a token, tokens/s, memory.

    ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.benchmarks.decoding qwen05b v5e1 --rows 64 --prompt 512 --new 512
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.benchmarks.decoding qwen05b v5e8 --rows 256 --prompt 256 --new 256 \\
        sharding=replicated
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.benchmarks.decoding gemma3_270m v5e1 --rows 32 --prompt 256 --new 256

The compiler estimates no cycles for `top_k` (a custom call) and none for weights that are fetched while it computes: a
token takes at least what its weights and its cache take at the bandwidth of the memory, the floor.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")

from hydra import compose, initialize_config_dir

from tpu_experiments.config.compose import to_config
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import Config, register
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.planning.compiled import ITEM_BYTES, Compilers, elements_of_chip
from tpu_experiments.planning.hlo.program import read_program
from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.tracing import tracing_runtime
from tpu_experiments.tasks.plan.decoding import lowered_decoding
from tpu_experiments.tasks.plan.formulas import shapes_source

GIB = 2**30


def main() -> None:
    """Print a line for each of the two programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("hw")
    for name in ("rows", "prompt", "new"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--call", type=int, default=8, help="tokens a call")
    parser.add_argument("--top-k", type=int, default=0, help="0: the whole vocabulary")
    chosen, overrides = parser.parse_known_args()
    register()
    with initialize_config_dir(str(Path(__file__).parents[2] / "conf"), version_base="1.3"):
        own = [f"model={chosen.model}", f"hw={chosen.hw}", "data=sample_text", *overrides]
        config = to_config(compose("config", overrides=own))
    runtime = tracing_runtime(config.hw, sharding=config.sharding)
    module = build_frozen(shapes_source(config), lora=LoraConfig(r=0), trained={}, place=runtime.place)
    decoder = Decoder(
        module,
        runtime=runtime,
        choice=ChoiceConfig(do_sample=True, top_k=chosen.top_k),
        num_rows=chosen.rows,
        max_new_tokens=chosen.new,
        tokens_per_call=chosen.call,
        seed=0,
    )
    programs = lowered_decoding(decoder, length=chosen.prompt, with_shape=1)
    with tempfile.TemporaryDirectory() as folder, Compilers(1) as compilers:
        for program, tokens in zip(programs, (1, decoder.tokens_per_call), strict=True):
            compiled = compilers.submit(program, hw=config.hw, folder=folder).result()
            if compiled.memory is None:
                print(f"{program.name}: does not fit")
                continue
            cost, memory = read_program(compiled.optimized_hlo()), compiled.memory
            seconds = cost.cycles / (config.hw.chip.clock_ghz * 1e9) / tokens
            moved = ", ".join(f"{t.kind} {t.num_bytes:,} bytes" for t in cost.transfers) or "none"
            print(
                f"{program.name}: {seconds * 1e3:.2f} ms"
                f"{against_floor(config, program, seconds=seconds, rows=chosen.rows) if tokens > 1 else ''}; "
                f"{memory.total / GIB:.2f} GiB a chip, {memory.temporaries / GIB:.2f} of it temporary; "
                f"collectives: {moved}"
            )


def against_floor(config: Config, program: Lowered, *, seconds: float, rows: int) -> str:
    """Tokens a second, and the time in which a chip reads its weights and its cache once."""
    sizes = (elements_of_chip(each, mesh=program.mesh) * ITEM_BYTES[each.dtype] for each in program.arguments)
    floor = sum(sizes) / (config.hw.chip.hbm_gb_per_second * 1e9)
    return f" a token, {rows / seconds:,.0f} tokens/s, floor {floor * 1e3:.2f} ms ({floor / seconds:.0%})"


if __name__ == "__main__":
    main()
