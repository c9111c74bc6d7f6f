"""Choose the backend that lowers programs on a machine without its devices."""

from typing import Any

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import ShardingConfig


def tracing_runtime(hw: HwConfig, *, sharding: ShardingConfig) -> Any:
    """Return the `Runtime` of hw.runtime whose programs are lowered (runtime/lowered.py) instead of run."""
    if hw.runtime == "torchtpu":
        from tpu_experiments.runtime.tpu.tracing import TracingRuntime as TorchTpuTracing

        return TorchTpuTracing(hw, sharding=sharding)
    from tpu_experiments.runtime.xla.tracing import TracingRuntime

    return TracingRuntime(hw, sharding=sharding)
