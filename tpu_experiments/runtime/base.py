"""The Runtime protocol: what the rest of the package may ask of a device.

`runtime/xla/device.py` implements it on torch_xla, `tpu/device.py` by TorchTPU, `eager.py` in plain torch. A `program`
is a function of one batch (a dict of tensors on the device) that runs as one compiled graph; nothing in it may read a
tensor on the host. What its compilation depends on beside its code is its signature: shape and type of every input."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_experiments.config.data_schema import LoaderConfig
from tpu_experiments.runtime.boxes import Box, Shape
from tpu_experiments.runtime.ops import Constrain, Folding, Loop
from tpu_experiments.runtime.processes.hosts import Hosts

Signature = tuple[tuple[str, Shape, str], ...]
"""(name, shape, dtype) of every tensor of a batch, in its order."""


def signature_of(batch: Mapping[str, Tensor]) -> Signature:
    """Return the signature of a batch."""
    return tuple((name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in batch.items())


def leading_shape(signature: Signature) -> Shape:
    """Return the shape of the first tensor, the token ids, which distinguishes the programs of a run."""
    return signature[0][1] if signature else ()


def shape_text(shape: Shape) -> str:
    """Format a shape as `1 x 16 x 128`; a scalar's is `()`."""
    return " x ".join(map(str, shape)) or "()"


def signature_text(signature: Signature) -> str:
    """Format a signature, grouped by shape and type: `ids, learn 1 x 16 x 128 int32; lr 1 float32`."""
    names: dict[str, list[str]] = {}
    for name, shape, dtype in signature:
        names.setdefault(f"{shape_text(shape)} {dtype}", []).append(name)
    return "; ".join(f"{', '.join(group)} {kind}" for kind, group in names.items())


def difference(now: Signature, *, seen: Collection[Signature], expected: Collection[Shape]) -> str:
    """Describe the inputs that differ from the nearest signature seen so far, with both shapes.

    Where none was seen, compare the shape of the first input with the expected ones.
    """
    if not seen:
        name, shape, _ = now[0]
        return f"{name} is {shape_text(shape)}, not {' or '.join(sorted(map(shape_text, expected)))}"
    before = min(seen, key=lambda one: len(set(one) ^ set(now)))
    old, new = ({name: f"{shape_text(shape)} {dtype}" for name, shape, dtype in one} for one in (before, now))
    changes: dict[str, list[str]] = {}
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            was_is = f"{old.get(name, 'not there')} and is {new.get(name, 'missing')}"
            changes.setdefault(was_is, []).append(name)
    shown = "; ".join(f"{', '.join(names)} was {was_is}" for was_is, names in changes.items())
    return shown or "its inputs come in another order"


def flattened(out: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Flatten a result, a dataclass by its fields; return the leaves and the inverse."""
    kind = type(out) if hasattr(out, "__dataclass_fields__") else None
    leaves, spec = tree_flatten(vars(out) if kind else out)

    def build(new: list[Any]) -> Any:
        made = tree_unflatten(new, spec)
        return kind(**made) if kind else made

    return leaves, build


Batch = Mapping[str, Tensor]
Held = Callable[[], Mapping[str, Tensor]]
"""Returns the current tensors, by name, that a program reads or writes and other code may replace between calls."""
OnOutput = Callable[[Any], None]
"""Called with the outputs of a program once they are computed, possibly in another thread."""
Out = TypeVar("Out")
Result = TypeVar("Result", covariant=True)
Info = TypeVar("Info")


@dataclass
class CompileCache:
    """Hits and misses of the persistent compile cache in this process."""

    folder: str
    hits: int = 0
    """Programs loaded from the cache."""
    misses: int = 0
    """Programs compiled and added to the cache."""
    unreadable: int = 0
    """Programs in the cache that could not be loaded, and were compiled again."""


@dataclass
class Counters:
    """Compiler activity in this process so far."""

    num_compiles: int = 0
    compiles_after_warmup: int = 0
    compile_seconds: float = 0.0
    trace_seconds: float = 0.0
    """Wall time of tracing: inside the Python functions of programs."""
    dispatch_seconds: float = 0.0
    """CPU time of the calling thread in dispatching graphs; waiting for the device is not included."""
    cache: CompileCache | None = None
    """None without a persistent cache."""


class UnexpectedProgram(RuntimeError):
    """A program outside those known before the run's first step; the text says what changed.

    Raised before a step, when all steps before it are complete, so that they can be checkpointed.
    """

    def __init__(self, text: str, *, explain: Callable[[], str] | None = None) -> None:
        super().__init__(text)
        self._explain = explain

    def explain(self) -> str:
        """Return which value changed, or an empty string where that cannot be found.

        It traces once more, which leaves the tensors on the device unusable.
        """
        return self._explain() if self._explain is not None else ""


class Runtime(Protocol):
    """The devices of a run, as one process sees them."""

    device: torch.device
    rank: int
    world_size: int
    """Processes of the run; only rank 0 writes files, except the shards of a checkpoint of several hosts."""
    share: tuple[int, int]
    """Index and number of the equal parts of a batch's rows of which this process feeds one: `(rank, world_size)` in
    `spawn`; (0, 1) where a process feeds whole batches, also as one of several hosts in `spmd`."""
    hosts: Hosts
    """Hosts that run one program together (`hw.num_hosts`); a single one in `spawn`."""
    num_devices: int
    loop: Loop
    """Loop inside a program."""
    constrain: Constrain
    """Sharding constraint on a value inside a program."""
    folding: Folding | None
    """What folded layers need; None where programs are not compiled as a whole, so that folding has no use."""

    def seed(self, value: int) -> None:
        """Set the device's random state, on which alone the draws of the next program depend."""

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        """Copy a parameter or a tensor of its shape to the device, in spmd with the sharding of `name`."""

    def zeros(self, shape: torch.Size, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Create zeros on the device, in spmd with the sharding of the parameter or slot `name`."""

    def boxes(self, tensor: Tensor) -> list[Box]:
        """Return the boxes of a placed tensor that this process's devices hold: of an unsharded one, the whole."""

    def copy_boxes(self, tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
        """Return contiguous host copies of some of `boxes(tensor)`; waits for the device and compiles no program."""

    def put(self, batch: Batch, *, rows_dim: int) -> dict[str, Tensor]:
        """Send host tensors to the device in one transfer, sharded along `rows_dim` in spmd.

        Vectors are replicated.
        """

    def feed(
        self, batches: Iterator[tuple[Info, dict[str, Tensor]]], *, rows_dim: int, settings: LoaderConfig
    ) -> AbstractContextManager[Iterator[tuple[Info, dict[str, Tensor]]]]:
        """Prefetch batches to the device in background threads, in order; each is sent as by `put`.

        Args:
            batches: pairs of host-side information and host tensors, the same names in each. Read in another thread.

        An exception of `batches` is raised to the consumer after the batches before it. Leaving the context ends the
        threads at any point of the iteration, after the batch that is being assembled.
        """

    def program(self, function: Callable[[Batch], Out], *, name: str, held: Held = dict) -> "Program[Out]":
        """Compile `function` into one program per batch shape.

        On XLA the function is traced in the first calls and in one of `trainer.trace_every_steps`; the other calls
        replay its graph with the current batch, held tensors and random state. So its result must depend on tensors
        alone.

        Args:
            held: returns every tensor that the function writes, whose buffer is donated to its new value, and those it
                reads that other code writes or replaces. If written tensors are missing here, every call is traced.
        """

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None:
        """Declare the shapes of token ids that the programs of these names are compiled for.

        With `trainer.on_recompile=error` another shape raises UnexpectedProgram. Programs not named here take any.
        """

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sum each tensor over the processes that share a batch; inside a program it is part of the graph."""

    def any_process(self, flag: bool) -> bool:
        """Return whether `flag` is True on any process; a collective that all processes must call."""

    def barrier(self, tag: str) -> None:
        """Block until every process has called it."""

    def wait(self) -> None:
        """Block until everything queued on the device is done, step closures included."""

    def start_profile(self, folder: str) -> None:
        """Start a profile of host and device, with every call of a program as a step under its name."""

    def stop_profile(self) -> None:
        """Stop the profile and write it to `<folder>/plugins/profile/<time>/`, where TensorBoard expects it.

        The device must be idle.
        """

    def counters(self) -> Counters:
        """Return the compiler activity of this process so far."""

    def memory_gib(self) -> float | None:
        """Return the device memory in use in GiB; None where the device does not report it."""

    def peak_memory_gib(self) -> float | None:
        """Return the peak of device memory in GiB since the start; None where the device does not report it."""


def device_name(runtime: Runtime) -> str:
    """Return the name of a runtime's device; by TorchTPU it is jax's, since the tensors have none."""
    return str(getattr(runtime, "chip", runtime.device))


class Program(Protocol[Result]):
    """A compiled function of a batch."""

    def __call__(self, batch: Batch, *, on_output: OnOutput | None = None) -> Result:
        """Queue the program on the device and return its outputs without waiting for them.

        Args:
            on_output: called with the same outputs once they are computed, possibly in another thread.
        """
