"""A program of a run before it is compiled: what a backend's tracing gives, and the plan reads."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

import torch
from torch import Tensor

from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.runtime.base import Batch, Counters, Held, OnOutput, Out
from tpu_experiments.runtime.sharding import ShardingTable, batch_axes

BATCH = "batch/"


@dataclass(frozen=True)
class Argument:
    """One argument of a program."""

    name: str
    """Name of the parameter, `<parameter>/<slot>` for optimizer state, `batch/<tensor>`, or empty for a constant."""
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    """Mesh axes that each dimension is sharded over."""
    alias: int | None = None
    """Number of the output that reuses its buffer, since the run overwrites the old values."""


@dataclass(frozen=True)
class Lowered:
    """One program of a run, before it is compiled."""

    name: str
    """`train`, `eval` or `sample`."""
    shape: tuple[int, ...]
    """Shape of the batch's token ids."""
    module: bytes = field(repr=False)
    """Serialized HloModuleProto (`form=hlo`, torch_xla's), or StableHLO as text (`stablehlo`, TorchTPU's)."""
    arguments: tuple[Argument, ...] = field(repr=False)
    resident: tuple[Argument, ...] = field(repr=False)
    """Arrays that the run keeps on the device and this program does not read."""
    mesh: Mesh
    """Chips over which the compiler partitions the program (spmd); otherwise one."""
    num_replicas: int
    """Number of processes that run it concurrently (spawn)."""
    trace_seconds: float
    num_adapters: int = 1
    """Adapters that a training step trains, each on a batch of its own."""
    form: Literal["hlo", "stablehlo"] = "hlo"
    has_split_results: bool = False
    """Whether the compiler decides how results are sharded that overwrite nothing, as torch_xla lets it (spmd);
    otherwise each device has them whole, which differs for the keys and values of prompts alone."""

    @property
    def num_partitions(self) -> int:
        """Number of chips of the mesh."""
        return self.mesh.num_devices


@dataclass(frozen=True)
class PlannedProgram(Generic[Out]):
    """A program of the run as `Runtime.program` was asked for it; a call runs its function."""

    function: Callable[[Batch], Out]
    name: str
    held: Held

    def __call__(self, batch: Batch, *, on_output: OnOutput | None = None) -> Out:
        return self.function(batch)


class DevicelessRuntime:
    """What the `Runtime`s have in common whose programs are lowered instead of run.

    A backend adds what makes a placeholder, and `lower`.
    """

    def __init__(self) -> None:
        self.placed: list[tuple[str, Tensor]] = []

    def placeholder(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this shape and data type without a buffer."""
        raise NotImplementedError

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        placeholder = self.placeholder(tensor)
        self.placed.append((name, placeholder))
        return placeholder

    def zeros(self, shape: torch.Size, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.place(torch.empty(shape, dtype=dtype, device="meta"), name=name)

    def put(self, batch: Mapping[str, Tensor], *, rows_dim: int) -> dict[str, Tensor]:
        return {name: self.placeholder(tensor) for name, tensor in batch.items()}

    @contextmanager
    def feed(self, batches: Any, *, rows_dim: int, settings: Any) -> Iterator[Iterator[Any]]:
        raise NotImplementedError("a plan has no data")

    def program(self, function: Callable[[Batch], Out], *, name: str, held: Held = dict) -> PlannedProgram[Out]:
        return PlannedProgram(function, name, held)

    def any_process(self, flag: bool) -> bool:
        return flag

    def barrier(self, tag: str) -> None: ...

    def wait(self) -> None: ...

    def counters(self) -> Counters:
        return Counters()

    def memory_gib(self) -> float | None:
        return None


def axes_of(name: str, shape: tuple[int, ...], *, table: ShardingTable | None, mesh: Mesh, rows_dim: int) -> Axes:
    """Return the run's sharding of an argument: of a parameter by the sharding table, of a batch along its rows.

    Args:
        name: as in `Argument`.
        table: None where nothing is sharded.
    """
    if table is None:
        return (None,) * len(shape)
    if name.startswith(BATCH):
        return batch_axes(len(shape), rows_dim=rows_dim, mesh=mesh)
    return table.axes(name, shape)


def kind_of(tensor: Tensor) -> str:
    """Return the name of a tensor's data type, as in `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
