"""Steps of a tiny model with `put` and with the feed, in a process of its own: the number of devices is fixed at start.

python -m tests.training.feeding inline|spmd NUM_DEVICES   # prints one JSON line
"""

import json
import os
import sys
from typing import Any

NUM_STEPS = 24


def main(parallel: str, num_devices: int) -> None:
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices)}
    from hydra import compose, initialize_config_dir

    from tests.training.runs import REPOSITORY
    from tpu_experiments.config.compose import to_config
    from tpu_experiments.config.schema import register
    from tpu_experiments.runtime.processes.launch import make_runtime

    register()
    overrides = ["model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "lora.dropout=0.1"]
    overrides += [f"hw.parallel={parallel}", f"hw.num_devices={num_devices}"]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        config = to_config(compose("config", overrides=overrides))
    runtime = make_runtime(config)
    print(json.dumps({way: losses(config, runtime, way=way) for way in ("put", "feed", "feed_two_threads")}))


def losses(config: Any, runtime: Any, *, way: str) -> dict[str, Any]:
    """The losses of the steps, what was compiled, and whether a batch lies where `put` puts it."""
    from torch_xla import _XLAC

    from tests.training.tiny import Run, random_batch
    from tpu_experiments.config.data_schema import LoaderConfig

    run = Run(config, runtime)
    batches = [random_batch(i, accumulation=2, rows=4, dropout=config.lora.dropout) for i in range(NUM_STEPS)]
    spec = _XLAC._get_xla_sharding_spec(runtime.put(batches[0], rows_dim=1)["ids"])
    before = runtime.counters()
    outputs, specs = [], set()

    def step(index: int, batch: Any) -> None:
        outputs.append(run.program(batch))
        specs.add(_XLAC._get_xla_sharding_spec(batch["ids"]))

    if way == "put":
        for index, batch in enumerate(batches):
            step(index, runtime.put(batch, rows_dim=1))
    else:
        settings = LoaderConfig(host_to_device_transfer_threads=2 if way == "feed_two_threads" else 1)
        with runtime.feed(iter(enumerate(batches)), rows_dim=1, settings=settings) as feed:
            for index, batch in feed:
                step(index, batch)
    runtime.wait()
    return {
        "losses": [float(output.loss.cpu()) for output in outputs],
        "compiles": runtime.counters().num_compiles - before.num_compiles,
        "compiles_after_warmup": runtime.counters().compiles_after_warmup,
        "same_sharding": specs == {spec},
        "sharding": spec,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
