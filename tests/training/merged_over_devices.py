"""Prints what a copy of a folded model in training writes over four virtual devices, in a process of its own.

python -m tests.training.merged_over_devices sharding=fsdp      # one JSON line
"""

import json
import os
import sys
from typing import Any

NUM_DEVICES = 4
SETTINGS = {"num_rows": 6, "max_new_tokens": 11, "tokens_per_call": 5, "seed": 3}
BUCKET = 32


def written(config: Any, runtime: Any) -> dict[str, Any]:
    """Text by three sets of trained parameters in turn, each after a refresh, and what was compiled."""
    import torch

    from tests.models.generation import small
    from tpu_experiments.config.task_schema import ChoiceConfig
    from tpu_experiments.models.huggingface import HuggingFaceModel
    from tpu_experiments.models.passes.generation import Decoder, Sampling
    from tpu_experiments.models.sources.build import build_model
    from tpu_experiments.runtime.stacked import stacked
    from tpu_experiments.training.merged import MergedCopy

    source = HuggingFaceModel(config.model, seed=config.seed)
    model = build_model(source, lora=small.LORA, seed=0, place=runtime.place, folding=runtime.folding, is_trained=True)
    copy = MergedCopy(model, lora=small.LORA, runtime=runtime)
    decoder = Decoder(
        copy.module,
        runtime=runtime,
        choice=ChoiceConfig(do_sample=True, top_k=0),
        weights=lambda: copy.tensors,
        is_alone=False,
        **SETTINGS,
    )
    found: dict[str, Any] = {"names": sorted(model.trainable), "ids": [], "log_probs": []}
    prompts = small.prompts_of(*range(4, 4 + SETTINGS["num_rows"]))
    drawn: dict[str, torch.Tensor] = {}
    for strength in (0.0, 1.0, 2.0) * 3:  # the later calls replay graphs, with weights of other buffers
        for name, tensor in small.changed_weights(source).items():
            drawn[name] = tensor * strength
        for name in model.trainable:
            model.trainable[name] = runtime.place(stacked(drawn, name), name=name)
        copy.refresh()
        whole = decoder.complete(prompts, draws=range(len(prompts)), bucket=BUCKET, sampling=Sampling(1.1))
        found["ids"].append(whole.ids_BN.tolist())
        found["log_probs"].append(whole.log_probs_BN.tolist())
    found["traced"] = getattr(decoder.buckets[BUCKET].decode_program, "num_traced", None)
    found["shapes"] = {name: list(t.shape) for name, t in copy.tensors.items()}
    found["compiles"] = runtime.counters().num_compiles
    if runtime.device.type == "xla":
        import torch_xla

        found["specs"] = sorted({torch_xla._XLAC._get_xla_sharding_spec(t) for t in copy.tensors.values()})
    copy.release()
    found["released"] = all(p.is_meta for p in copy.module.parameters())
    return found


def main(overrides: list[str]) -> None:
    """Write over the devices."""
    from tests.config.composing import composed
    from tests.models.generation import small
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = composed(
        *small.overrides("qwen05b", "xla"), f"hw.num_devices={NUM_DEVICES}", "hw.parallel=spmd", *overrides
    )
    runtime = XlaRuntime(config.hw, sharding=config.sharding, on_recompile="error", trace_every=4)
    print(json.dumps(written(config, runtime)))


if __name__ == "__main__":
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(NUM_DEVICES)}
    main(sys.argv[1:])
