"""Planned speed of the decoder's programs on a TPU: those of `task=plan task.decode.rows=`, without a run's others.

    ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.benchmarks.decoding qwen05b v5e1 --rows 64 --prompt 512 --new 512
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.benchmarks.decoding qwen05b v5e8 --rows 256 --prompt 256 --new 256
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
from tpu_experiments.config.schema import register
from tpu_experiments.config.task_schema import DecodeConfig
from tpu_experiments.planning.compiled import Compilers
from tpu_experiments.tasks.plan.decoding import submit_decoding


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
    settings = DecodeConfig(chosen.rows, chosen.prompt, chosen.new, chosen.call, chosen.top_k)
    with tempfile.TemporaryDirectory() as folder, Compilers(1) as compilers:
        found = submit_decoding(config, settings, compilers=compilers, folder=folder).planned()
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in found.classes.items())
    if found.prefill_seconds is None or found.token_seconds is None:
        print(f"does not fit: {found.total_gib:.2f} GiB a chip ({parts})")
        return
    print(f"read: {found.prefill_seconds * 1e3:.2f} ms")
    print(
        f"write: {found.token_seconds * 1e3:.2f} ms a token, {found.rows / found.token_seconds:,.0f} tokens/s, floor "
        f"{found.floor_seconds * 1e3:.2f} ms ({found.share_of_floor:.0%}); {found.total_gib:.2f} GiB a chip ({parts})"
    )


if __name__ == "__main__":
    main()
