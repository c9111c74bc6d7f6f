"""Prints what a decoder writes over four virtual devices, and how its cache is sharded, in a process of its own.

python -m tests.models.generation.sharded sharding=replicated      # one JSON line
"""

import json
import os
import sys

NUM_DEVICES = 4
ROWS, NEW, BUCKET = 8, 14, 32
SETTINGS = {"num_rows": ROWS, "max_new_tokens": NEW, "tokens_per_call": 5, "seed": 3}


def main(overrides: list[str]) -> None:
    """Sampled and greedy, by two programs."""
    import torch_xla

    from tests.config.composing import composed
    from tests.models.generation import small
    from tpu_experiments.config.task_schema import ChoiceConfig
    from tpu_experiments.models.passes.generation import Decoder, Sampling
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = composed(
        *small.overrides("qwen05b", "xla"), f"hw.num_devices={NUM_DEVICES}", "hw.parallel=spmd", *overrides
    )
    runtime = XlaRuntime(config.hw, sharding=config.sharding, on_recompile="error")
    module = small.with_adapter(config, runtime)
    decoder = Decoder(module, runtime=runtime, choice=ChoiceConfig(do_sample=True, top_k=0), **SETTINGS)
    prompts = small.prompts_of(*range(4, 4 + ROWS))
    before, found = runtime.counters().num_compiles, {}
    for heat in (1.2, 0.0, 1.2):
        whole = decoder.complete(prompts, draws=range(ROWS), bucket=BUCKET, sampling=Sampling(heat))
        found[str(heat)] = {"ids": whole.ids_BN.tolist(), "log_probs": whole.log_probs_BN.tolist()}
    state = decoder.buckets[BUCKET].state
    found["specs"] = sorted({torch_xla._XLAC._get_xla_sharding_spec(t) for n, t in state.items() if "layer" in n})
    found["compiles"] = runtime.counters().num_compiles - before
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(NUM_DEVICES)}
    main(sys.argv[1:])
