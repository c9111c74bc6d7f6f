"""Compile StableHLO and run it by jax's client, on one device of this process.

The only file of this backend that depends on jax's internals.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_experiments.runtime.base import CompileCache


def executable_of(text: str, *, aliases: Mapping[int, int], devices: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """Compile a module for devices of jax; return the function of its arguments' arrays on this process's device.

    Args:
        aliases: number of the result that takes an argument's buffer, by the argument's number.
        devices: those of all processes, one each; every one runs the program of its process.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    ids = np.array([device.id for device in devices]).reshape(-1, 1)
    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=ids, backend=client
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        entry = next(op for op in module.body.operations if op.name.value == "main")
        index = ir.IntegerType.get_signless(32)
        attributes = [
            {"tf.aliasing_output": ir.IntegerAttr.get(index, aliases[number])} if number in aliases else {}
            for number in range(len(entry.type.inputs))
        ]
        entry.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in attributes])
        every, chosen = np.array(devices, dtype=object), xla_client.DeviceList(tuple(devices))
        program = compiler.compile_or_get_cached(client, module, every, options, [], chosen)

    def run(arrays: list[Any]) -> list[Any]:
        found = program.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return [parts[0] for parts in found]

    return run


def cache_in(folder: str) -> CompileCache:
    """Have jax keep the programs that this process compiles in a folder, and load those that are there.

    Returns:
        Hits and misses, which count up.
    """
    import jax

    os.makedirs(folder, exist_ok=True)
    for name, value in (
        ("jax_compilation_cache_dir", folder),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)
    cache = CompileCache(folder)

    def count(event: str, **_: Any) -> None:
        cache.hits += event == "/jax/compilation_cache/cache_hits"
        cache.misses += event == "/jax/compilation_cache/cache_misses"

    jax.monitoring.register_event_listener(count)
    return cache


def devices_seen(device: str) -> tuple[int, str, float]:
    """Return the number of jax's devices, their type, and 1 + 1 computed on the first; for processes/probe.py."""
    import jax
    import numpy as np

    found = jax.devices(device)
    one = jax.device_put(np.ones(()), found[0])
    return len(found), found[0].platform, float(one + one)
