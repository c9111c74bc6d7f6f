"""What the rest of the package may ask of a device: the Runtime protocol.

`xla.py` implements it on torch_xla, `eager.py` in plain torch. A `program` is a function of one batch (a dict of
tensors on the device) that runs as one compiled graph; nothing in it may read a tensor on the host.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tpu_experiments.config.preparing import LoaderConfig
from tpu_experiments.runtime.layout import Folding, Lay
from tpu_experiments.runtime.loop import Loop
from tpu_experiments.runtime.signature import Shape

Batch = Mapping[str, Tensor]
Held = Callable[[], Mapping[str, Tensor]]
"""The tensors of now, by name, that a program reads or writes and that other code changes or replaces between calls."""
Out = TypeVar("Out")
Result = TypeVar("Result", covariant=True)
Info = TypeVar("Info")


@dataclass
class CompileCache:
    """What the folder of compiled programs was good for in this process."""

    folder: str
    hits: int = 0
    """Programs that were loaded."""
    misses: int = 0
    """Programs that were not there, and are now."""
    unreadable: int = 0
    """Programs that were there and could not be loaded, so they were compiled."""


@dataclass
class Counters:
    """What the device's compiler did so far in this process."""

    num_compiles: int = 0
    compiles_after_warmup: int = 0
    compile_seconds: float = 0.0
    trace_seconds: float = 0.0
    """Wall time in the functions of programs."""
    dispatch_seconds: float = 0.0
    """Time of the calling thread's CPU in handing their graphs over; waiting for the device is not in it."""
    cache: CompileCache | None = None
    """None where none is kept."""


class UnexpectedProgram(RuntimeError):
    """A program that the run was not known to need; the text says what changed.

    Raised before a step, when all steps before it are whole, so that they can be saved.
    """

    def __init__(self, text: str, *, explain: Callable[[], str] | None = None) -> None:
        super().__init__(text)
        self._explain = explain

    def explain(self) -> str:
        """Which value it was, where that can be told: it traces once more, and spoils what lies on the device."""
        return self._explain() if self._explain is not None else ""


class Runtime(Protocol):
    """One process's view of its devices."""

    device: torch.device
    rank: int
    world_size: int
    """Processes of the run; only rank 0 writes."""
    share: tuple[int, int]
    """Which of how many equal parts of a batch's rows this process feeds: `(rank, world_size)` in `spawn`; (0, 1) where
    a process feeds whole batches, also as one of several hosts in `spmd`."""
    num_devices: int
    loop: Loop
    """A loop inside a program."""
    lay: Lay
    """Where a value inside a program lies."""
    folding: Folding | None
    """What folded layers need; None where nothing is compiled as a whole, and layers are better left as they are."""

    def seed(self, value: int) -> None:
        """Set the device's random state; what the next program draws from it depends on nothing else."""

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        """Copy a parameter or a tensor shaped like it to where `name` lives (sharded by the table in spmd)."""

    def zeros(self, shape: torch.Size, *, name: str) -> Tensor:
        """float32 zeros where `name` lives."""

    def put(self, batch: Batch, *, rows_dim: int) -> dict[str, Tensor]:
        """Send host tensors to the device in one transfer; tensors that have `rows_dim` are split along it in spmd."""

    def feed(
        self, batches: Iterator[tuple[Info, dict[str, Tensor]]], *, rows_dim: int, settings: LoaderConfig
    ) -> AbstractContextManager[Iterator[tuple[Info, dict[str, Tensor]]]]:
        """As `put` for every batch, in the same order, assembled and sent ahead by other threads.

        Args:
            batches: what stays on the host, and host tensors of one set of names. It is read in another thread.

        An exception of `batches` is raised to the consumer after the batches before it. Leaving the context ends the
        threads, wherever the consumer is; it waits for the batch that is being assembled.
        """

    def program(self, function: Callable[[Batch], Out], *, name: str, held: Held = dict) -> "Program[Out]":
        """`function` as one compiled program per batch shape.

        On XLA the function runs for the first calls and for one in `trainer.trace_every_steps`; the others run the
        graph that it built, with the batch, the held tensors and the random state of now. So what it computes must
        depend on tensors alone.

        Args:
            held: every tensor that the function writes, which gives up its buffer to its new value, and those it reads
                that other code writes or replaces. Without those it writes, every call is traced.
        """

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None:
        """Say which shapes of token ids the programs of these names take; with `trainer.on_recompile=error` they take
        no other (UnexpectedProgram). Programs that are not named here take any."""

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sum each tensor over the processes that share a batch; inside a program it is part of the graph."""

    def any_process(self, flag: bool) -> bool:
        """True on every process when it is True on one; all processes must call it."""

    def barrier(self, tag: str) -> None:
        """Wait for every process."""

    def wait(self) -> None:
        """Wait until everything queued on the device is done, step closures included."""

    def start_profile(self, folder: str) -> None:
        """Record what host and device do, every call of a program as a step under its name, until `stop_profile`."""

    def stop_profile(self) -> None:
        """Write `<folder>/plugins/profile/<time>/`, where TensorBoard looks for it; the device must be idle."""

    def counters(self) -> Counters:
        """Compiler activity so far."""

    def memory_gib(self) -> float | None:
        """Device memory in use in GiB; None where the device does not tell."""

    def peak_memory_gib(self) -> float | None:
        """The most that was in use so far."""


class Program(Protocol[Result]):
    """A compiled function of a batch."""

    def __call__(self, batch: Batch, *, then: Callable[[Any], None] | None = None) -> Result:
        """Queue it. `then` gets the same outputs once they are computed, possibly in another thread."""
