"""Start the devices of a runtime, count them and add two numbers there, in a process that then ends.

    python -m tpu_experiments.runtime.processes.probe xla|torchtpu|eager cpu|tpu|cuda

prints one line of JSON: num_devices, kind, sum, seconds; of a GPU also name, gib and has_bf16. task=doctor runs it as a
child, because a process that has started a TPU holds it until it ends.
"""

import json
import os
import sys
import time

from tpu_experiments.runtime.processes.env import raise_memlock
from tpu_experiments.runtime.processes.tether import die_with


def main(runtime: str, device: str) -> None:
    """Print the result as JSON; an exception of the runtime ends the process with its traceback."""
    started = time.perf_counter()
    if device == "tpu":
        raise_memlock()
    if runtime == "xla":
        from tpu_experiments.runtime.xla.device import devices_seen
    elif runtime == "torchtpu":
        from tpu_experiments.runtime.tpu.compiling import devices_seen
    else:
        from tpu_experiments.runtime.eager import devices_seen
    num_devices, kind, total = devices_seen(device)
    seconds = round(time.perf_counter() - started, 2)
    facts = _facts_of_gpu() if device == "cuda" else {}
    found = {"num_devices": num_devices, "kind": kind, "sum": total, "seconds": seconds, **facts}
    print(json.dumps(found), flush=True)


def _facts_of_gpu() -> dict[str, str | float | bool]:
    from tpu_experiments.runtime.eager import facts_of_gpu

    return facts_of_gpu()


if __name__ == "__main__":
    die_with(os.getppid())
    main(*sys.argv[1:3])
