"""Runtime in plain torch on CPU or CUDA: the reference that the xla runtime is tested against.

In `spawn` it is one process per device with torch.distributed (gloo on CPU, nccl on CUDA).
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tpu_experiments.config.data_schema import LoaderConfig
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.base import Batch, Counters, Held, Info, Out, Program, Shape
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.cuda_graphs import GraphProgram, Graphs
from tpu_experiments.runtime.feed import Prefetcher
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.kernels.delta import install_delta_kernel
from tpu_experiments.runtime.kernels.grouped import install_grouped_products
from tpu_experiments.runtime.ops import Constrain, Folding, Loop, python_loop, unconstrained
from tpu_experiments.runtime.processes.hosts import Hosts

GIB = 2**30


def threads_of(num_processes: int) -> int:
    """Return OMP_NUM_THREADS where it is set to a number, else this process's part of the usable cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, len(os.sched_getaffinity(0)) // num_processes)


class EagerRuntime:
    """One process in plain torch; `rank` of `world_size` when torch.distributed is initialised."""

    def __init__(self, hw: HwConfig) -> None:
        distributed = dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.share = self.rank, self.world_size
        self.hosts = Hosts()
        self.num_devices = hw.num_devices
        self.device = torch.device(f"cuda:{self.rank}" if hw.device == "cuda" else "cpu")
        if hw.device == "cpu":
            torch.set_num_threads(hw.num_threads or threads_of(self.world_size))
        self._graphs: Graphs | None = None
        if hw.device == "cuda" and hw.cuda_graphs and self.world_size == 1:
            self._graphs = Graphs()
        self.loop: Loop = python_loop if self._graphs is None else self._graphs.loop
        self.constrain: Constrain = unconstrained
        self.folding: Folding | None = None
        self._profile: torch.profiler.profile | None = None
        install_attention_kernel(None)
        install_grouped_products(None)
        install_delta_kernel(None)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        return tensor.to(self.device)

    def zeros(self, shape: torch.Size, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def boxes(self, tensor: Tensor) -> list[Box]:
        return [Box.whole(tensor.shape)]

    def copy_boxes(self, tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
        return [tensor.detach()[box.slices].to("cpu", copy=True).contiguous() for box in boxes]

    def put(self, batch: Batch, *, rows_dim: int) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    @contextmanager
    def feed(
        self, batches: Iterator[tuple[Info, dict[str, Tensor]]], *, rows_dim: int, settings: LoaderConfig
    ) -> Iterator[Iterator[tuple[Info, dict[str, Tensor]]]]:
        pinned = ((info, self._pin(batch)) for info, batch in batches)
        with closing(Prefetcher(pinned, size=settings.loader_prefetch_size)) as ahead:
            yield ((info, self.put(batch, rows_dim=rows_dim)) for info, batch in ahead)

    def _pin(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Page-lock the tensors of a batch: only then is a copy to CUDA asynchronous."""
        return {name: t.pin_memory() for name, t in batch.items()} if self.device.type == "cuda" else batch

    def program(self, function: Callable[[Batch], Out], *, name: str, held: Held = dict) -> Program[Out]:
        if self._graphs is not None:
            return GraphProgram(self._graphs, function, name=name, held=held)

        def run(batch: Batch, *, on_output: Callable[[Out], None] | None = None) -> Out:
            with torch.profiler.record_function(name):
                out = function(batch)
            if on_output is not None:
                on_output(out)
            return out

        return run

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None: ...

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.world_size == 1:
            return tensors
        flat = torch.cat([t.detach().reshape(-1).to(torch.float32) for t in tensors])
        dist.all_reduce(flat)
        parts = flat.split([t.numel() for t in tensors])
        return [part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]

    def any_process(self, flag: bool) -> bool:
        if self.world_size == 1:
            return flag
        votes = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(votes)
        return bool(votes.item() > 0)

    def barrier(self, tag: str) -> None:
        if self.world_size > 1:
            dist.barrier()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def start_profile(self, folder: str) -> None:
        place = Path(folder) / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
        place.mkdir(parents=True, exist_ok=True)
        self._profile = torch.profiler.profile(
            on_trace_ready=lambda made: made.export_chrome_trace(str(place / f"{socket.gethostname()}.trace.json.gz"))
        )
        self._profile.start()

    def stop_profile(self) -> None:
        assert self._profile is not None, "start_profile comes first"
        self._profile.stop()
        self._profile = None

    def counters(self) -> Counters:
        return Counters()

    def memory_gib(self) -> float | None:
        return torch.cuda.memory_allocated() / GIB if self.device.type == "cuda" else None

    def peak_memory_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else None


def facts_of_gpu() -> dict[str, str | float | bool]:
    """Return name, GiB and arithmetic of the first GPU, for runtime/processes/probe.py."""
    found = torch.cuda.get_device_properties(0)
    # Of compute capability 7.5 and less (T4, V100) bf16 is emulated.
    return {"name": found.name, "gib": found.total_memory / GIB, "has_bf16": found.major >= 8}


def devices_seen(device: str) -> tuple[int, str, float]:
    """Return the number of plain torch's devices, their type, and 1 + 1 computed on the first.

    For runtime/processes/probe.py. On a CPU it is 1: processes share the device, so a run may ask for any number.
    """
    one = torch.ones((), device=device)
    return torch.cuda.device_count() if device == "cuda" else 1, device, float((one + one).cpu())
