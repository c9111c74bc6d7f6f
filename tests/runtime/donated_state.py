"""Prints, for six calls of a program on several virtual devices, whether its old state was given up.

python -m tests.runtime.donated_state NUM_DEVICES   # one JSON line
"""

import json
import os
import sys


def main(num_devices: int) -> None:
    """Three traced calls and three that are not, on state that is split over the devices."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices)}
    import torch
    import torch_xla

    from tests.config.composing import composed
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = composed("hw=cpu", "model=tiny", "data=sample_text", "hw.parallel=spmd", f"hw.num_devices={num_devices}")
    runtime = XlaRuntime(config.hw, sharding=config.sharding, on_recompile="error", trace_every=50)
    state = runtime.put({name: torch.ones(num_devices * 2, 8) for name in ("w", "m")}, rows_dim=0)

    def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state["m"].copy_(state["m"] * 0.9 + batch["ids"])
        state["w"].copy_(state["w"] - 0.1 * state["m"])
        return {"sum": state["w"].sum()}

    program = runtime.program(step, name="train", held=lambda: state)
    is_gone, sums, shardings = [], [], []
    for index in range(6):
        old = [torch_xla._XLAC._get_tensors_xla_device_data_node([t + 1])[1][0] for t in state.values()]
        batch = runtime.put({"ids": torch.full((num_devices * 2, 8), 1.0 + index)}, rows_dim=0)
        sums.append(float(program(batch)["sum"].cpu()))
        runtime.wait()
        is_gone.append([not readable(tensor) for tensor in old])
        shardings.append(torch_xla._XLAC._get_xla_sharding_specs(list(state.values())))
    num_traced, compiles = program.num_traced, runtime.counters().num_compiles
    print(json.dumps([is_gone, sums, shardings, num_traced, compiles]))


def readable(tensor: object) -> bool:
    """Whether the data of a tensor is still on the device."""
    try:
        tensor.cpu()  # type: ignore[attr-defined]
    except RuntimeError as error:
        return "HasValue" not in str(error)  # of a deleted buffer on each device
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
