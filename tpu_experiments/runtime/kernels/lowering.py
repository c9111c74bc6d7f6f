"""Functions of jax with Pallas kernels: split over chips, and lowered to HLO without a TPU. jax alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from tpu_experiments.runtime.kernels.attention import Target
from tpu_experiments.runtime.patches import mosaic_for_libtpu


def on_each_chip(run: Callable[..., Any], *, shards: int, tensor: int, given: Any, made: Any) -> Callable[..., Any]:
    """Wrap a function in a shard_map over `shards` parts of rows (`fsdp`) and `tensor` parts of heads.

    XLA's partitioner cannot shard a kernel. A function of one chip is returned as it is.

    Args:
        given: specs of the arguments, and `made` of the results.
    """
    jax.config.update("jax_use_shardy_partitioner", False)  # programs are partitioned by GSPMD
    if shards * tensor == 1:
        return run
    sizes = (shards, tensor) if tensor > 1 else (shards,)
    kinds = (AxisType.Auto,) * len(sizes)  # jax 0.12 takes them for explicit ones where nothing is said
    mesh = AbstractMesh(sizes, ("fsdp", "tensor")[: len(sizes)], axis_types=kinds)
    return jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)


def hlo_of(run: Callable[..., Any], arguments: Sequence[Any], *, target: Target) -> bytes:
    """Return the serialised HloModuleProto of a function for arguments of these shapes."""
    with mosaic_for_libtpu():
        traced = jax.jit(run, keep_unused=True).trace(*arguments)
        module = traced.lower(lowering_platforms=("tpu" if target == "tpu" else "cpu",)).compiler_ir("hlo")
    return bytes(module.as_serialized_hlo_module_proto())
