"""Runtime on torch_xla.

`inline`: one device. `spmd`: all devices as one, of one host or of several with a process each, arrays annotated with
a sharding and the graph partitioned by XLA. `spawn`: one process per device, gradients summed in the graph."""

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.utils.utils import getenv_as

from tpu_experiments.config.data_schema import LoaderConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.runtime.base import Batch, Counters, Held, Info, Out, Program, Shape
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.feed import Dealer
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.kernels.delta import install_delta_kernel
from tpu_experiments.runtime.kernels.grouped import install_grouped_products
from tpu_experiments.runtime.kernels.on_xla import attention_kernel_for, delta_rule_for, grouped_products_for
from tpu_experiments.runtime.ops import Folding
from tpu_experiments.runtime.processes import hosts
from tpu_experiments.runtime.sharding import ShardingTable, batch_axes
from tpu_experiments.runtime.xla.layout import Spec, boxes_on_host, local_boxes, replicated_results, xla_mesh
from tpu_experiments.runtime.xla.loop import folding_on
from tpu_experiments.runtime.xla.programs import Closures, Compiles, XlaProgram

log = logging.getLogger(__name__)
GIB = 2**30
NEVER_SYNC = 2**62
"""Batches between syncs of torch_xla's loader: never. A program syncs itself; another sync per batch took 1.5 ms."""


class XlaRuntime:
    """One process on torch_xla."""

    def __init__(
        self,
        hw: HwConfig,
        *,
        sharding: ShardingConfig,
        on_recompile: str = "warn",
        compile_cache: str | None = None,
        trace_every: int = 1,
    ) -> None:
        if trace_every > 1 and not getenv_as("XLA_ENABLE_PARAM_ALIASING", bool, True):
            raise ConfigError(
                f"trainer.trace_every_steps={trace_every} replays graphs that donate their buffers, and "
                "XLA_ENABLE_PARAM_ALIASING=0 forbids that; unset it, or set trainer.trace_every_steps=1."
            )
        self.mesh: xs.Mesh | None = None
        if compile_cache is not None:  # must precede torch_xla's first computation
            os.makedirs(compile_cache, exist_ok=True)
            xr.initialize_cache(compile_cache, readonly=False)
        if hw.parallel == "spmd":
            xr.use_spmd()
        self.device = torch_xla.device()  # before any CPU backward: it starts autograd's XLA queue
        found = xr.global_runtime_device_count()
        if found != hw.num_devices:
            raise ConfigError(
                f"hw.num_devices={hw.num_devices} but torch_xla sees {found} devices; set hw.num_devices={found}, "
                "or close the process that holds the others."
            )
        self.mesh_sizes = mesh = mesh_of(hw, sharding)
        if hw.parallel == "spmd":
            self.mesh = xla_mesh(mesh)
        install_attention_kernel(attention_kernel_for(hw, mesh=mesh, device=xr.device_type()))
        install_grouped_products(grouped_products_for(hw, mesh=mesh, device=xr.device_type()))
        install_delta_kernel(delta_rule_for(hw, mesh=mesh, device=xr.device_type()))
        self.num_devices = found
        # With spmd torch_xla 2.9.0 knows one virtual device, and raises an error where its memory is asked for.
        self._has_memory = xr.device_type() == "TPU" and self.mesh is None
        self.hosts = hosts.joined()
        if hw.parallel == "spawn":
            self.rank, self.world_size = self.share = xr.global_ordinal(), xr.world_size()
        else:
            self.rank, self.world_size, self.share = self.hosts.rank, self.hosts.size, (0, 1)
        self._table = ShardingTable(sharding, mesh=mesh)
        folding = folding_on(xr.device_type(), hw=hw, mesh=mesh, table=self._table)
        self.folding: Folding | None = folding
        self.loop, self.constrain = folding.loop, folding.constrain
        self._kept = folding.in_place.kept if folding.in_place is not None else {}
        self.closures = Closures()
        self.compiles = Compiles(policy=on_recompile, cache_folder=compile_cache, trace_every=trace_every)

    def seed(self, value: int) -> None:
        xm.set_rng_state(value, str(self.device))

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        if self.mesh is None:
            return tensor.to(self.device)
        spec = Spec(self.mesh, self._table.axes(name, tuple(tensor.shape)))
        (placed,) = xm.send_cpu_data_to_device([tensor.contiguous()], self.device, spec)
        return placed

    def zeros(self, shape: torch.Size, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.place(torch.zeros(shape, dtype=dtype), name=name)

    def boxes(self, tensor: Tensor) -> list[Box]:
        return local_boxes(tensor)

    def copy_boxes(self, tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
        return boxes_on_host(tensor, boxes)

    def put(self, batch: Batch, *, rows_dim: int) -> dict[str, Tensor]:
        names, tensors = list(batch), list(batch.values())
        if self.mesh is None:
            return dict(zip(names, xm.send_cpu_data_to_device(tensors, self.device), strict=True))
        sent: dict[str, Tensor] = {}
        for ndim in {t.ndim for t in tensors}:
            group = [n for n in names if batch[n].ndim == ndim]
            spec = self._rows_spec(ndim, rows_dim=rows_dim)
            values = xm.send_cpu_data_to_device([batch[n] for n in group], self.device, spec)
            sent |= dict(zip(group, values, strict=True))
        return {name: sent[name] for name in names}

    def _rows_spec(self, ndim: int, *, rows_dim: int) -> xs.ShardingSpec:
        return Spec(self.mesh, batch_axes(ndim, rows_dim=rows_dim, mesh=self.mesh_sizes))

    @contextmanager
    def feed(
        self, batches: Iterator[tuple[Info, dict[str, Tensor]]], *, rows_dim: int, settings: LoaderConfig
    ) -> Iterator[Iterator[tuple[Info, dict[str, Tensor]]]]:
        first = next(batches, None)
        if first is None:
            yield iter(())
            return
        specs = None
        if self.mesh is not None:
            specs = {name: self._rows_spec(tensor.ndim, rows_dim=rows_dim) for name, tensor in first[1].items()}
        # One loader with several threads reorders batches (100 of 200 arrived late) and reports the error of one thread
        # only after the others are done: so there is one loader per thread, and they take turns.
        dealer = Dealer(itertools.chain([first], batches), num_readers=settings.host_to_device_transfer_threads)
        loaders = [
            iter(
                MpDeviceLoader(
                    dealer.reader(index),
                    self.device,
                    loader_prefetch_size=settings.loader_prefetch_size,
                    device_prefetch_size=settings.device_prefetch_size,
                    host_to_device_transfer_threads=1,
                    batches_per_execution=NEVER_SYNC,
                    input_sharding=specs,
                )
            )
            for index in range(settings.host_to_device_transfer_threads)
        ]
        try:
            yield _arrivals(dealer, loaders)
        finally:
            dealer.end()
            for loader in loaders:
                loader._loader.close()

    def program(self, function: Callable[[Batch], Out], *, name: str, held: Held = dict) -> Program[Out]:
        if self.hosts.size > 1:  # a host has only its own shards of a result, and reads results by itself
            function = replicated_results(function, constrain=self.constrain)
        kept = self._kept

        def every() -> dict[str, Tensor]:
            return {**held(), **kept}

        return XlaProgram(function, name=name, compiles=self.compiles, held=every, closures=self.closures)

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None:
        self.compiles.expect(shapes)

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.share[1] == 1:
            return tensors
        summed = [t.clone() for t in tensors]
        xm.all_reduce(xm.REDUCE_SUM, summed)
        return summed

    def any_process(self, flag: bool) -> bool:
        if self.share[1] == 1:
            return self.hosts.any(flag)
        return bool(xm.mesh_reduce("any_process", flag, any))

    def barrier(self, tag: str) -> None:
        if self.share[1] == 1:
            self.hosts.barrier()
        else:
            xm.rendezvous(tag)

    def wait(self) -> None:
        xm.wait_device_ops()
        torch_xla.sync()
        self.closures.wait()

    def start_profile(self, folder: str) -> None:
        xp.start_trace(folder)
        self.compiles.is_profiled = True

    def stop_profile(self) -> None:
        self.compiles.is_profiled = False
        xp.stop_trace()

    def counters(self) -> Counters:
        return self.compiles.counters()

    def memory_gib(self) -> float | None:
        return self._memory("bytes_used")

    def peak_memory_gib(self) -> float | None:
        return self._memory("peak_bytes_used")

    def _memory(self, kind: str) -> float | None:
        """Return one of a TPU's memory statistics; None where torch_xla has none, as for all chips as one (spmd)."""
        if not self._has_memory:
            return None
        try:
            return float(xm.get_memory_info(self.device)[kind]) / GIB
        except RuntimeError as error:
            self._has_memory = False
            log.info("no memory statistics: %s", str(error).strip().partition("\n")[0])
            return None


def _arrivals(dealer: Dealer[Info, dict[str, Tensor]], loaders: list[Any]) -> Iterator[tuple[Info, dict[str, Tensor]]]:
    for loader in itertools.cycle(loaders):
        tensors = next(loader, None)
        if tensors is None:
            # A loader ends in the same way after the last batch and after an exception of its iterator.
            dealer.raise_if_early()
            return
        yield dealer.info(), tensors


def devices_seen(device: str) -> tuple[int, str, float]:
    """Return the number of devices of all processes, their type, and 1 + 1 computed on the first."""
    one = torch.ones((), device=torch_xla.device())
    total = float((one + one).cpu())
    kind = xr.device_type() or device
    return xr.global_runtime_device_count(), kind, total
