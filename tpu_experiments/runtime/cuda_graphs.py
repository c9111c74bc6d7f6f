"""Programs of one NVIDIA GPU as CUDA graphs: recorded once, then started by the driver instead of by Python.

A step of a small model is tens of thousands of short operations. Started one by one they take the host 39 us each and
leave the GPU idle (tests/benchmarks/RESULTS.md, "On a GPU"). A recording holds the addresses of what it reads and
writes, so a batch is copied into the recorded one, and tensors that others replace (`held`) make a new recording
necessary.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic

import torch
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.base import Batch, Held, Out, Signature, flattened, signature_of
from tpu_experiments.runtime.ops import LoopCall, Tensors, detached, python_loop

log = logging.getLogger(__name__)
MOST_RECORDINGS = 4
"""Of one program and signature. One whose tensors are replaced more often, as a decoder's are for every prompt, then
runs operation by operation: recording takes longer than that."""
Addresses = tuple[tuple[str, int], ...]


class Graphs:
    """What the recordings of a process share: a memory pool and a stream.

    One pool, since no recording needs what is in it from one call to the next: inputs are outside, and outputs are
    copied out of it.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.recording: Recording | None = None
        """The one that is being made."""

    def loop(self, call: LoopCall) -> tuple[Tensors, Tensors]:
        """Run a loop; in a recording, the outermost one is a graph of its body."""
        recording = self.recording
        return python_loop(call) if recording is None or recording.is_in_loop else recording.loop(call)


class Recording:
    """A program for one signature: its graphs and the loops over one, in the order in which they run."""

    def __init__(self, graphs: Graphs, function: Callable[[Batch], Any], batch: Batch) -> None:
        """Record the function without running it.

        Raises:
            RuntimeError: it does something that only the host can do.
        """
        self.is_in_loop = False
        self._graphs = graphs
        self._actions: list[Callable[[], None]] = []
        self._inputs = {name: tensor.clone() for name, tensor in batch.items()}
        graphs.recording = self
        self._begin()
        try:
            out = function(self._inputs)
            self._end()
        except BaseException:
            self._abandon()
            raise
        finally:
            graphs.recording = None
        self._leaves, self._build = flattened(out)

    def __call__(self, batch: Batch) -> Any:
        """Run the program on a batch; returns its outputs, which the next call leaves alone."""
        with torch.no_grad():
            for name, tensor in self._inputs.items():
                tensor.copy_(batch[name])
            for action in self._actions:
                action()
            return self._build([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves])

    def loop(self, call: LoopCall) -> tuple[Tensors, Tensors]:
        """Record a loop: what was before it, and its body once."""
        with torch.no_grad():
            carried = tuple(value.detach().clone() for value in call.carry)
            xs = detached(call.xs)
            x = tuple(torch.empty_like(tensor[0]) for tensor in xs)
            self._end()
            self._begin()
            self.is_in_loop = True
            new, ys = call.body(carried, x, detached(call.consts))
            # One that lies in a carried value is copied before that is written.
            addresses = {value.untyped_storage().data_ptr() for value in carried}
            new, ys = (
                tuple(n.clone() if n.untyped_storage().data_ptr() in addresses else n.detach() for n in values)
                for values in (new, ys)
            )
            for old, value in zip(carried, new, strict=True):
                old.copy_(value)
            self.is_in_loop = False
            body = self._end()
            stacks = tuple(torch.empty((len(call.order), *y.shape), dtype=y.dtype, device=y.device) for y in ys)

        def run() -> None:
            for index in call.order:
                for place, tensor in zip(x, xs, strict=True):
                    place.copy_(tensor[index])
                body.replay()
                for stack, y in zip(stacks, ys, strict=True):
                    stack[index].copy_(y)

        self._actions[-1] = run
        self._begin()
        return carried, stacks

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on: one pins the next batches.
        self._context = torch.cuda.graph(
            self._graph, pool=self._graphs.pool, stream=self._graphs.stream, capture_error_mode="thread_local"
        )
        self._context.__enter__()
        torch.zeros((), device=self._graphs.stream.device)  # torch warns of a graph of nothing, as before a loop

    def _end(self) -> torch.cuda.CUDAGraph:
        self._context.__exit__(None, None, None)
        self._actions.append(self._graph.replay)
        return self._graph

    def _abandon(self) -> None:
        """Leave a recording that failed, whose stream says once more that it did, for one of next to nothing.

        Without it the GPU's generator takes the process for still recording, and every draw fails.
        """
        try:
            self._context.__exit__(None, None, None)
        except RuntimeError:
            self._context.stream_ctx.__exit__(None, None, None)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros((), device=self._graphs.stream.device)


class GraphProgram(Generic[Out]):
    """A program that runs operation by operation at first, to load kernels and make tables, and is recorded then."""

    def __init__(self, graphs: Graphs, function: Callable[[Batch], Out], *, name: str, held: Held) -> None:
        self._graphs, self._function, self._name, self._held = graphs, function, name, held
        self._recordings: dict[Signature, Recording] = {}
        self._addresses: dict[Signature, Addresses] = {}
        self._num_recorded: dict[Signature, int] = {}
        self._draws = False
        """Whether it draws from the GPU's generator, whose state recomputed layers cannot set back in a recording."""

    def __call__(self, batch: Batch, *, on_output: Callable[[Out], None] | None = None) -> Out:
        with torch.profiler.record_function(self._name):
            out = self._run(batch)
        if on_output is not None:
            on_output(out)
        return out

    def _run(self, batch: Batch) -> Out:
        key, addresses = signature_of(batch), addresses_of(self._held())
        if self._addresses.get(key) != addresses:
            self._addresses[key] = addresses
            self._recordings.pop(key, None)
            return self._operation_by_operation(batch)
        if key not in self._recordings:
            recorded = self._num_recorded.get(key, 0)
            if self._draws or recorded == MOST_RECORDINGS:
                return self._function(batch)
            self._num_recorded[key] = recorded + 1
            self._recordings[key] = self._recorded(batch)
        out: Out = self._recordings[key](batch)
        return out

    def _operation_by_operation(self, batch: Batch) -> Out:
        """Run the function, and note whether it draws from the GPU's generator."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.get_offset()
        out = self._function(batch)
        if generator.get_offset() != before and not self._draws:
            self._draws = True
            log.info("%s draws random numbers from the GPU's generator; it is not recorded as a CUDA graph", self._name)
        return out

    def _recorded(self, batch: Batch) -> Recording:
        try:
            return Recording(self._graphs, self._function, batch)
        except RuntimeError as error:
            if "captur" not in str(error).lower():
                raise
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"hw.cuda_graphs=true; the program `{self._name}` cannot be recorded: it waits for the GPU, reads a "
                f"tensor on the host or asks for the GPU's random state ({reason}); hw.cuda_graphs=false runs it "
                "operation by operation."
            ) from error


def addresses_of(tensors: Mapping[str, Tensor]) -> Addresses:
    """Return where each tensor's numbers are."""
    return tuple((name, tensor.data_ptr()) for name, tensor in tensors.items())
