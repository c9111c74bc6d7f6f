"""Runtime on torch_xla: the only file, with `xla_*.py`, that names it for training.

`inline`: one device. `spmd`: all devices of the host as one, arrays annotated with a sharding and the graph
partitioned by XLA. `spawn`: one process per device, gradients summed in the graph.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.preparing import LoaderConfig
from tpu_experiments.config.sources import ShardingConfig
from tpu_experiments.runtime.attention import install_attention_kernel
from tpu_experiments.runtime.base import Batch, Counters, Info, Out, Program
from tpu_experiments.runtime.feed import Dealer
from tpu_experiments.runtime.layout import Lay, as_it_lies
from tpu_experiments.runtime.loop import Loop
from tpu_experiments.runtime.sharding import AXIS, ShardingTable, batch_axes
from tpu_experiments.runtime.xla_attention import attention_kernel_for
from tpu_experiments.runtime.xla_layout import lay_over
from tpu_experiments.runtime.xla_loop import xla_loop

log = logging.getLogger(__name__)
GIB = 2**30
NEVER_SYNC = 2**62
"""Batches between two syncs of torch_xla's loader. A program syncs itself; a second sync for each batch took 1.5 ms."""


class XlaRuntime:
    """One process on torch_xla."""

    def __init__(self, hw: HwConfig, *, sharding: ShardingConfig) -> None:
        self.mesh: xs.Mesh | None = None
        if hw.parallel == "spmd":
            xr.use_spmd()
        self.device = torch_xla.device()  # before any CPU backward: it starts autograd's XLA queue
        found = xr.global_runtime_device_count()
        if found != hw.num_devices:
            raise ConfigError(
                f"hw.num_devices={hw.num_devices} but torch_xla sees {found} devices; set hw.num_devices={found}, "
                "or close the process that holds the others."
            )
        if hw.parallel == "spmd":
            self.mesh = xs.Mesh(np.arange(found), (found,), (AXIS,))
        install_attention_kernel(attention_kernel_for(hw, device=xr.device_type()))
        self.num_devices = found
        self.rank = xr.global_ordinal() if hw.parallel == "spawn" else 0
        self.world_size = xr.world_size() if hw.parallel == "spawn" else 1
        self._table = ShardingTable(sharding, num_devices=found)
        self.loop: Loop = xla_loop
        self.lay: Lay = lay_over(num_devices=found) if hw.parallel == "spmd" else as_it_lies
        self._first_call_compiles = 0
        self._setup_compiles: int | None = None
        self._warm = False
        self._trace_seconds = 0.0

    def seed(self, value: int) -> None:
        xm.set_rng_state(value, str(self.device))

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        if self.mesh is None:
            return tensor.to(self.device)
        spec = xs.ShardingSpec(self.mesh, self._table.axes(name, tuple(tensor.shape)))
        (placed,) = xm.send_cpu_data_to_device([tensor.contiguous()], self.device, spec)
        return placed

    def zeros(self, shape: torch.Size, *, name: str) -> Tensor:
        return self.place(torch.zeros(shape), name=name)

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
        return xs.ShardingSpec(self.mesh, batch_axes(ndim, rows_dim=rows_dim))

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
        # A loader with several threads mixes up the order of the batches (100 of 200 came late), and tells that one of
        # them failed only when the others are done: so as many loaders of one thread each, taking turns.
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

    def program(self, function: Callable[[Batch], Out], *, name: str) -> Program[Out]:
        seen: set[tuple[tuple[int, ...], ...]] = set()

        def run(batch: Batch, *, then: Callable[[Out], None] | None = None) -> Out:
            before = _num_compiles()
            if self._setup_compiles is None:
                self._setup_compiles = before
            started = time.perf_counter()
            out = function(batch)
            self._trace_seconds += time.perf_counter() - started
            if then is not None:
                xm.add_step_closure(then, args=(out,), run_async=True)
            torch_xla.sync()
            shapes = tuple(tuple(t.shape) for t in batch.values())
            compiled = _num_compiles() - before
            self._warm = True
            if shapes not in seen:
                seen.add(shapes)
                self._first_call_compiles += compiled
                log.info("%s %s: compiled %d program(s)", name, _shape_text(batch), compiled)
            elif compiled:
                log.warning("%s %s compiled again after warm-up", name, _shape_text(batch))
            return out

        return run

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.world_size == 1:
            return tensors
        summed = [t.clone() for t in tensors]
        xm.all_reduce(xm.REDUCE_SUM, summed)
        return summed

    def any_process(self, flag: bool) -> bool:
        if self.world_size == 1:
            return flag
        return bool(xm.mesh_reduce("any_process", flag, any))

    def barrier(self, tag: str) -> None:
        if self.world_size > 1:
            xm.rendezvous(tag)

    def wait(self) -> None:
        xm.wait_device_ops()
        # An empty closure behind the queued ones: the asynchronous handler runs them in order.
        done = torch.futures.Future()  # type: ignore[var-annotated]
        xm.add_step_closure(lambda: done.set_result(None), run_async=True)
        torch_xla.sync()
        done.wait()

    def counters(self) -> Counters:
        num = _num_compiles()
        after = num - self._first_call_compiles - (self._setup_compiles or 0)
        return Counters(
            num_compiles=num,
            compiles_after_warmup=after if self._warm else 0,
            compile_seconds=_compile_seconds(),
            trace_seconds=self._trace_seconds,
        )

    def memory_gib(self) -> float | None:
        if self.device.type != "xla" or xr.device_type() != "TPU":
            return None
        info = xm.get_memory_info(self.device)
        return float(info["bytes_used"]) / GIB


def _arrivals(dealer: Dealer[Info, dict[str, Tensor]], loaders: list[Any]) -> Iterator[tuple[Info, dict[str, Tensor]]]:
    for loader in itertools.cycle(loaders):
        tensors = next(loader, None)
        if tensors is None:
            # A loader ends in the same way at the last batch and after an exception of what it reads.
            dealer.raise_if_early()
            return
        yield dealer.info(), tensors


def _num_compiles() -> int:
    data = met.metric_data("CompileTime")
    return int(data[0]) if data else 0


def _compile_seconds() -> float:
    data = met.metric_data("CompileTime")
    return float(data[1]) / 1e9 if data else 0.0  # the metric counts nanoseconds


def _shape_text(batch: Batch) -> str:
    shapes = {tuple(t.shape) for t in batch.values() if t.ndim > 1}
    return " ".join("x".join(map(str, s)) for s in sorted(shapes, key=len))
