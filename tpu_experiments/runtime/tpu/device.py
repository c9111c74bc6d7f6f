"""Runtime by TorchTPU: programs are lowered by it (tracing.py), compiled and run by jax's client.

jax drives the device, since a client of it for the CPU exists: there the same code trains, and is tested. On a TPU it
has never run. In `spawn` every process has one device and runs its own program on its rows; sums over all devices are
in the programs.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Generic

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpu_experiments.config.data_schema import LoaderConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Axes, mesh_of
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.runtime.base import (
    Batch,
    Counters,
    Held,
    Info,
    OnOutput,
    Out,
    Program,
    Shape,
    Signature,
    UnexpectedProgram,
    difference,
    flattened,
    leading_shape,
    signature_of,
)
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.feed import Prefetcher
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.kernels.delta import install_delta_kernel
from tpu_experiments.runtime.kernels.grouped import install_grouped_products
from tpu_experiments.runtime.kernels.on_torchtpu import LaterAttention
from tpu_experiments.runtime.ops import Folding
from tpu_experiments.runtime.processes.hosts import joined
from tpu_experiments.runtime.sharding import ShardingTable, batch_axes
from tpu_experiments.runtime.tpu.buffers import BUFFERS, array_of, fetched, parts_of, torch_of
from tpu_experiments.runtime.tpu.collectives import folding_over, sum_over_chips
from tpu_experiments.runtime.tpu.compiling import Layout, cache_in, executable_of
from tpu_experiments.runtime.tpu.tracing import Target, by_role, function_of, load, stablehlo_of

log = logging.getLogger(__name__)
GIB = 2**30


class TorchTpuRuntime:
    """One process with its devices, whose tensors are of the meta device and stand for arrays (buffers.py).

    It is `rank` of `world_size` where torch.distributed is initialised, which carries what is no program's.

    Args:
        on_recompile: as `trainer.on_recompile`.
        compile_cache: folder of compiled programs, or None.
    """

    def __init__(
        self, hw: HwConfig, *, sharding: ShardingConfig, on_recompile: str, compile_cache: str | None = None
    ) -> None:
        import jax

        distributed, self.hosts = dist.is_initialized(), joined()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        if self.world_size > 1:
            jax.distributed.initialize(f"{self.hosts.first}:{agreed_port()}", self.world_size, self.rank)
        self.chip = jax.local_devices(backend=hw.device)[0]
        self.mesh = mesh_of(hw, sharding)
        self.table = ShardingTable(sharding, mesh=self.mesh) if hw.parallel == "spmd" else None
        found = sorted(jax.devices(hw.device), key=lambda chip: (chip.process_index, chip.id))
        if len(found) < hw.num_devices:
            raise ConfigError(
                f"hw.num_devices={hw.num_devices} but jax sees {len(found)}; set hw.num_devices={len(found)}."
            )
        self.chips = found[: hw.num_devices]
        self.layout = Layout(self.mesh, self.chips) if self.table is not None else None
        self.cache = None if compile_cache is None else cache_in(compile_cache)
        load()
        self.device = torch.device("meta")
        self.share = (0, 1) if hw.parallel == "spmd" else (self.rank, self.world_size)
        self.num_devices = hw.num_devices
        self.target = Target.of(hw, mesh=self.mesh)
        folding = folding_over(self.mesh, self.table, device=hw.device)
        self.folding: Folding | None = folding
        self.loop, self.constrain = folding.loop, folding.constrain
        self.on_recompile = on_recompile
        self.expected: dict[str, set[Shape]] = {}
        self.count = Counters(cache=self.cache)
        install_attention_kernel(LaterAttention() if hw.device == "tpu" else None)
        install_grouped_products(None)
        install_delta_kernel(None)

    def seed(self, value: int) -> None: ...

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        return self._placed(tensor, () if self.table is None else self.table.axes(name, tuple(tensor.shape)))

    def _placed(self, tensor: Tensor, axes: Axes) -> Tensor:
        to = self.chip if self.layout is None else self.layout.of(axes)
        return BUFFERS.stands_for(array_of(tensor, device=to), like=tensor)

    def zeros(self, shape: torch.Size, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.place(torch.zeros(shape, dtype=dtype), name=name)

    def boxes(self, tensor: Tensor) -> list[Box]:
        return [Box.whole(tensor.shape)] if self.hosts.size == 1 else list(parts_of(tensor.detach()))

    def copy_boxes(self, tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
        if self.hosts.size > 1:
            parts = parts_of(tensor.detach())
            return [torch_of(np.array(parts[box])) for box in boxes]
        whole = fetched(tensor.detach())
        return [whole[box.slices].contiguous() for box in boxes]

    def put(self, batch: Batch, *, rows_dim: int) -> dict[str, Tensor]:
        return {
            name: self._placed(tensor, batch_axes(tensor.ndim, rows_dim=rows_dim, mesh=self.mesh))
            for name, tensor in batch.items()
        }

    @contextmanager
    def feed(
        self, batches: Iterator[tuple[Info, dict[str, Tensor]]], *, rows_dim: int, settings: LoaderConfig
    ) -> Iterator[Iterator[tuple[Info, dict[str, Tensor]]]]:
        with closing(Prefetcher(batches, size=settings.loader_prefetch_size)) as ahead:
            yield ((info, self.put(batch, rows_dim=rows_dim)) for info, batch in ahead)

    def program(self, function: Callable[[Batch], Out], *, name: str, held: Held = dict) -> Program[Out]:
        return TorchTpuProgram(function, name=name, held=held, runtime=self)

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None:
        self.expected |= shapes

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self.share[1] == 1 else sum_over_chips(tensors)

    def any_process(self, flag: bool) -> bool:
        if self.share[1] == 1:
            return self.hosts.any(flag)
        votes = torch.tensor([float(flag)])
        dist.all_reduce(votes)
        return bool(votes.item() > 0)

    def barrier(self, tag: str) -> None:
        self.any_process(False)  # torch's own barrier asks for the device that TorchTPU has registered

    def wait(self) -> None: ...

    def start_profile(self, folder: str) -> None:
        import jax

        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        import jax

        jax.profiler.stop_trace()

    def counters(self) -> Counters:
        return self.count

    def memory_gib(self) -> float | None:
        return self._memory("bytes_in_use")

    def peak_memory_gib(self) -> float | None:
        return self._memory("peak_bytes_in_use")

    def _memory(self, kind: str) -> float | None:
        known = self.chip.memory_stats() or {}
        return float(known[kind]) / GIB if kind in known else None


def agreed_port() -> int:
    """Return a free port of this machine, the same in all processes."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found = [probe.getsockname()[1]]
    dist.broadcast_object_list(found)
    return int(found[0])


class TorchTpuProgram(Generic[Out]):
    """A function of a batch, compiled for every signature that it meets."""

    def __init__(self, function: Callable[[Batch], Out], *, name: str, held: Held, runtime: TorchTpuRuntime) -> None:
        self.function, self.name, self.held, self.runtime = function, name, held, runtime
        self.compiled: dict[Signature, Compiled] = {}

    def __call__(self, batch: Batch, *, on_output: OnOutput | None = None) -> Out:
        signature = signature_of(batch)
        found = self.compiled.get(signature)
        if found is None:
            self._require_expected(signature)
            found = self.compiled[signature] = self._compile(batch)
        elif not found.is_traced_again:
            self._require_same(found, batch)
        out: Out = found.run(batch, held=self.held())
        if on_output is not None:
            on_output(out)
        return out

    def _require_expected(self, signature: Signature) -> None:
        """Refuse, or warn of, a shape that `Runtime.expect` does not have.

        Raises:
            UnexpectedProgram: the shape, and trainer.on_recompile=error.
        """
        expected = self.runtime.expected.get(self.name)
        if expected is None or leading_shape(signature) in expected:
            return
        changed = difference(signature, seen=list(self.compiled), expected=expected)
        text = f"program {self.name} would be compiled again: {changed}"
        if self.runtime.on_recompile == "error":
            raise UnexpectedProgram(text)
        log.warning("%s", text)
        self.runtime.count.compiles_after_warmup += 1

    def _require_same(self, known: "Compiled", batch: Batch) -> None:
        """Trace a second time: later calls run what was compiled, whatever Python would compute.

        Raises:
            UnexpectedProgram: the program is another one, and trainer.on_recompile=error.
        """
        text, *_ = self._lowered(batch)
        pairs = zip(known.text.splitlines(), text.splitlines(), strict=False)
        changed = [(before.strip()[:120], now.strip()[:120]) for before, now in pairs if before != now]
        known.text, known.is_traced_again = "", True
        if not changed:
            return
        before, now = changed[0]
        said = f"program {self.name} holds a value that Python computes, and it has changed: {before} became {now}"
        if self.runtime.on_recompile == "error":
            raise UnexpectedProgram(said)
        log.warning("%s; it stays as it was", said)

    def _lowered(self, batch: Batch) -> tuple[str, list[tuple[str, Tensor]], list[int], Out]:
        """Return the program as StableHLO, its inputs, the numbers of those written, and its result without values."""
        given = by_role(batch, held=self.held())
        outs: list[Any] = []

        def run(_: list[Tensor]) -> list[Tensor]:
            outs.append(self.function(batch))
            leaves, _build = flattened(outs[-1])
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        graph, inputs, written = function_of(run, given, known=BUFFERS.__contains__)
        for _, tensor in inputs:
            BUFFERS.accept(tensor)  # tracing has written nothing
        text = stablehlo_of(graph, [tensor for _, tensor in inputs], target=self.runtime.target)
        return text, inputs, written, outs[-1]

    def _compile(self, batch: Batch) -> "Compiled":
        started = time.perf_counter()
        text, inputs, written, out = self._lowered(batch)
        traced = time.perf_counter()
        aliases = {number: index for index, number in enumerate(written)}
        hits = 0 if self.runtime.cache is None else self.runtime.cache.hits
        layout = self.runtime.layout
        if layout is None:
            run_on_chip = executable_of(text, aliases=aliases, devices=self.runtime.chips, cache=self.runtime.cache)
        else:
            run_on_chip = layout.executable_of(
                text, aliases=aliases, arrays=[BUFFERS[t] for _, t in inputs], cache=self.runtime.cache
            )
        is_new = self.runtime.cache is None or self.runtime.cache.hits == hits
        self.runtime.count.num_compiles += is_new
        self.runtime.count.trace_seconds += traced - started
        self.runtime.count.compile_seconds += time.perf_counter() - traced
        # Tensors of this call are not kept, or their values would stay on the device.
        fixed = [(name, None if name else tensor) for name, tensor in inputs]
        return Compiled(run_on_chip, fixed, written, out, text=text)


class Compiled:
    """One compiled program with its inputs and results.

    Args:
        inputs: in order, (`held/<name>` or `batch/<name>`, None), or ("", tensor) of those that are the same in every
            call.
        written: numbers of the inputs whose new values are the first results.
        out: a result of the function, whose tensors have no values.
        text: the program as StableHLO.
    """

    def __init__(
        self,
        run_on_chip: Callable[[list[Any]], list[Any]],
        inputs: Sequence[tuple[str, Tensor | None]],
        written: Sequence[int],
        out: Any,
        *,
        text: str,
    ) -> None:
        self.run_on_chip, self.inputs, self.written, self.out = run_on_chip, inputs, written, out
        self.text, self.is_traced_again = text, False

    def run(self, batch: Batch, *, held: Mapping[str, Tensor]) -> Any:
        """Queue the program, and return its result."""
        now = by_role(batch, held=held)
        tensors = [now[name] if fixed is None else fixed for name, fixed in self.inputs]
        BUFFERS.sweep()
        results = self.run_on_chip([BUFFERS[tensor] for tensor in tensors])
        for number, array in zip(self.written, results, strict=False):
            BUFFERS[tensors[number]] = array
        arrays = iter(results[len(self.written) :])
        leaves, build = flattened(self.out)
        return build([BUFFERS.stands_for(next(arrays), like=x) if isinstance(x, Tensor) else x for x in leaves])
