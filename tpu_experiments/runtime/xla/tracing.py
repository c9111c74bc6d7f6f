"""The trainer's own programs, traced on placeholders: shapes and data types without buffers.

A 7B model takes no memory. `TracingRuntime` takes the place of the trainer's devices: what the trainer uploads becomes
a placeholder, and a program is lowered instead of run. The result is its HLO, and the name and the sharding of every
argument, as in the run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Axes, Mesh, mesh_of
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.kernels.delta import install_delta_kernel
from tpu_experiments.runtime.kernels.grouped import install_grouped_products
from tpu_experiments.runtime.kernels.on_xla import attention_kernel_for, delta_rule_for, grouped_products_for
from tpu_experiments.runtime.lowered import (
    BATCH,
    Argument,
    DevicelessRuntime,
    Lowered,
    PlannedProgram,
    axes_of,
    kind_of,
)
from tpu_experiments.runtime.ops import Folding
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.xla.loop import folding_on


class TracingRuntime(DevicelessRuntime):
    """A `Runtime` without devices, whose programs are lowered instead of run."""

    def __init__(self, hw: HwConfig, *, sharding: ShardingConfig) -> None:
        super().__init__()
        if hw.parallel == "spmd":
            xr.use_spmd()  # else torch_xla refuses annotations
        self.device = torch_xla.device()
        xr.global_runtime_device_count()  # in SPMD mode autograd finds the device only after this
        # Starts autograd's queue for XLA; without it the first backward pass in this process aborts.
        torch.ones(2, device=self.device, requires_grad=True).sum().backward()
        self.mesh = mesh_of(hw, sharding)
        install_attention_kernel(attention_kernel_for(hw, mesh=self.mesh, device=hw.device))
        install_grouped_products(grouped_products_for(hw, mesh=self.mesh, device=hw.device))
        install_delta_kernel(delta_rule_for(hw, mesh=self.mesh, device=hw.device))
        self.num_devices = hw.num_devices
        self.rank, self.world_size = 0, hw.num_devices if hw.parallel == "spawn" else hw.num_hosts
        self.share = 0, hw.num_devices if hw.parallel == "spawn" else 1
        self.is_sharded, self.has_hosts = hw.parallel == "spmd", hw.num_hosts > 1
        self.table = ShardingTable(sharding, mesh=self.mesh)
        folding = folding_on(hw.device, hw=hw, mesh=self.mesh, table=self.table)
        self.folding: Folding | None = folding
        self.loop, self.constrain = folding.loop, folding.constrain

    def seed(self, value: int) -> None:
        xm.set_rng_state(value, str(self.device))

    def placeholder(self, tensor: Tensor) -> Tensor:
        return xb.create_placeholder_tensor(tensor.shape, tensor.dtype)

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.share[1] == 1:
            return tensors
        summed = [t.clone() for t in tensors]
        # The sum of xm.all_reduce, which itself omits it in a single process such as this one.
        torch_xla._XLAC._xla_all_reduce_inplace(xm.REDUCE_SUM, summed, 1.0, [list(range(self.share[1]))], True)
        return summed

    def lower(
        self,
        function: Callable[[dict[str, Tensor]], Any],
        *,
        name: str,
        batch: Mapping[str, Tensor],
        rows_dim: int,
        renewed: Callable[[Any], Sequence[tuple[Tensor, Tensor]]] = lambda out: (),
        num_adapters: int = 1,
        as_run: PlannedProgram[Any] | None = None,
    ) -> Lowered:
        """Lower `function` for host tensors like `batch`.

        Args:
            rows_dim: dimension of the batch that is split over the devices.
            renewed: maps the function's result to pairs (placeholder, new value) of everything that the run overwrites.
            as_run: the run's own program. Nothing depends on it: torch_xla loads no compiled program.
        """
        started = time.perf_counter()
        sent = self.put(batch, rows_dim=rows_dim)
        out = function(sent)
        pairs = list(renewed(out))
        new_values = [value for _, value in pairs]
        known = {id(value) for value in new_values}
        results = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and id(t) not in known]
        if self.has_hosts:  # as in runtime/xla/device.py
            results = [self.constrain(t, axes=()) for t in results]
        outputs = new_values + results
        lowering = torch_xla._XLAC.lowering.LoweringContext()
        lowering.build(outputs)
        alias = {lowering.tensor_parameter_id(old): index for index, (old, _) in enumerate(pairs)}
        return Lowered(
            name,
            tuple(next(iter(batch.values())).shape),
            module=lowering.hlo(),
            arguments=self._arguments(lowering, sent=sent, alias=alias, rows_dim=rows_dim),
            resident=self._resident(lowering),
            mesh=self.mesh if self.is_sharded else Mesh(),
            num_replicas=self.share[1],
            trace_seconds=time.perf_counter() - started,
            num_adapters=num_adapters,
        )

    def _arguments(
        self, lowering: Any, *, sent: Mapping[str, Tensor], alias: Mapping[int, int], rows_dim: int
    ) -> tuple[Argument, ...]:
        """Return the arguments by number; those that torch_xla made of values have no name.

        Such a value is, for example, a scalar that it keeps on the device.
        """
        by_number: dict[int, Argument] = {}
        for name, tensor in [*self.placed, *((BATCH + key, tensor) for key, tensor in sent.items())]:
            number, shape = lowering.tensor_parameter_id(tensor), tuple(tensor.shape)
            if number >= 0:  # else the program does not read it
                axes = self._axes(name, shape, rows_dim=rows_dim)
                by_number[number] = Argument(name, shape, kind_of(tensor), axes, alias.get(number))
        of_values = lowering.device_parameter_id_tensor_mapping()
        for number in of_values.keys() - by_number.keys():
            value = of_values[number]
            by_number[number] = Argument("", tuple(value.shape), kind_of(value), (None,) * value.ndim)
        return tuple(by_number[number] for number in range(len(by_number)))

    def _resident(self, lowering: Any) -> tuple[Argument, ...]:
        unread = [(n, t) for n, t in self.placed if lowering.tensor_parameter_id(t) < 0]
        return tuple(
            Argument(name, tuple(t.shape), kind_of(t), self._axes(name, tuple(t.shape), rows_dim=0))
            for name, t in unread
        )

    def _axes(self, name: str, shape: tuple[int, ...], *, rows_dim: int) -> Axes:
        table = self.table if self.is_sharded else None
        return axes_of(name, shape, table=table, mesh=self.mesh, rows_dim=rows_dim)
