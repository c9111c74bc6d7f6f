"""Compile StableHLO and run it by jax's client: on one device of this process, or partitioned over all its devices.

Beside runtime/stablehlo.py the only file of this backend that depends on jax's internals.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.config.model_schema import AXES
from tpu_experiments.runtime.base import CompileCache
from tpu_experiments.runtime.stablehlo import annotated
from tpu_experiments.runtime.tpu import planned

log = logging.getLogger(__name__)
Run = Callable[[list[Any]], list[Any]]
"""Maps the arrays of a program's arguments to those of its results."""


def executable_of(
    text: str, *, aliases: Mapping[int, int], devices: Sequence[Any], cache: CompileCache | None = None
) -> Run:
    """Compile a module for devices of jax, each of which runs it; return what runs it on this process's device.

    Args:
        aliases: number of the result that takes an argument's buffer, by the argument's number.
        devices: those of all processes, one each; every one runs the program of its process.
        cache: may have the program from a plan.
    """
    program = _compiled(text, aliases=aliases, devices=devices, cache=cache)

    def run(arrays: list[Any]) -> list[Any]:
        found = program.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return [parts[0] for parts in found]

    return run


class Layout:
    """A mesh of this process's devices, over which XLA partitions programs."""

    def __init__(self, mesh: Mesh, devices: Sequence[Any]) -> None:
        import jax
        import numpy as np

        self.mesh, self.devices = mesh, devices
        sizes = [mesh.size(axis) for axis in AXES]
        self._mesh = jax.sharding.Mesh(np.array(devices, dtype=object).reshape(sizes), AXES)

    def of(self, axes: Axes) -> Any:
        """Return jax's sharding of an array that is split over these axes."""
        import jax

        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*self.mesh.named(axes)))

    def executable_of(
        self, text: str, *, aliases: Mapping[int, int], arrays: Sequence[Any], cache: CompileCache | None = None
    ) -> Run:
        """Compile a module for arguments that lie as these arrays do; results without an alias are whole everywhere.

        Args:
            cache: may have the program from a plan.
        """
        import jax

        shardings = [array.sharding for array in arrays]
        axes = [(*array.sharding.spec, *(None for _ in array.shape))[: array.ndim] for array in arrays]
        shown = [self.mesh.sharding_text(each) for each in axes] if len(self.devices) > 1 else None
        program = _compiled(text, aliases=aliases, devices=self.devices, shardings=shown, cache=cache)
        of_result = {result: number for number, result in aliases.items()}
        shapes = [array.shape for array in arrays]
        whole = self.of(())

        def run(arrays: list[Any]) -> list[Any]:
            found = program.execute_sharded(arrays).disassemble_into_single_device_arrays()
            results = []
            for number, parts in enumerate(found):
                source = of_result.get(number)
                shape, sharding = (parts[0].shape, whole) if source is None else (shapes[source], shardings[source])
                results.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
            return results

        return run


def _compiled(
    text: str,
    *,
    aliases: Mapping[int, int],
    devices: Sequence[Any],
    shardings: Sequence[str] | None = None,
    cache: CompileCache | None = None,
) -> Any:
    """Compile a module that every device runs, or, with the arguments' shardings, one partitioned over the devices."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client

    client = devices[0].client
    replicas = len(devices) if shardings is None else 1
    options = options_of(devices, replicas=replicas)
    chosen = xla_client.DeviceList(tuple(devices))
    if cache is not None:
        facts = planned.facts_of(text, aliases=aliases, shardings=shardings, replicas=replicas, devices=devices)
        found = planned.read(Path(cache.folder), facts)
        loaded = None if found is None else _loaded(found, client=client, devices=chosen, options=options)
        if loaded is not None:
            cache.hits += 1
            return loaded
    with mlir.make_ir_context():
        module = annotated(text, aliases=aliases, shardings=shardings, has_whole_results=True)
        return compiler.compile_or_get_cached(client, module, np.array(devices, dtype=object), options, [], chosen)


def _loaded(serialised: bytes, *, client: Any, devices: Any, options: Any) -> Any:
    """Return a planned program on this process's devices, as jax.experimental.serialize_executable loads one; or None.

    A failure is no error: the program is compiled, as without a plan.
    """
    try:
        return client.deserialize_executable(serialised, devices, options)
    except Exception as error:  # jaxlib raises one type for all errors of the client
        said = f"{type(error).__name__}: {error}".splitlines()[0]  # an error without a text has a line too
        log.warning("a planned program cannot be loaded here, and is compiled: %s", said)
        return None


def options_of(devices: Sequence[Any], *, replicas: int) -> Any:
    """Return the compiler's options for a program that is replicated, and partitioned over the other devices."""
    import numpy as np
    from jax._src import compiler

    partitions = len(devices) // replicas
    options = compiler.get_compile_options(
        num_replicas=replicas,
        num_partitions=partitions,
        device_assignment=np.array([device.id for device in devices]).reshape(replicas, partitions),
        backend=devices[0].client,
    )
    options.executable_build_options.use_spmd_partitioning = partitions > 1
    options.executable_build_options.use_shardy_partitioner = False
    return options


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
