"""Replay: run the graph of an earlier trace instead of tracing the function in Python again.

Tracing an unrolled 7B step takes Python 1.3 s where the device takes 0.55 s. The graph is the same at every step as
long as what the function computes depends on tensors alone, so it is recorded, compared over three traces, and then run
by its hash, as torch_xla's bridge for torch.compile does (torch_xla 2.9, _dynamo/dynamo_bridge.py). `torch_xla.sync()`
cannot be used for that: it does not return the hash that it compiles under, and its program includes every live tensor
on the device. The outputs of a recorded program are the function's results and the held tensors that it writes.

Later traces come at random intervals, so that a periodic change is found in the end. That is a check, not a proof:
`config/tracing.py` allows replay for the steps of this project only.
"""

import gc
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from tpu_experiments.runtime.base import Batch, Held, OnOutput, Signature, flattened

Named = Mapping[str, Tensor]
SEED = "(seed)"
CONSTANT = "(constant)"
BATCH = "batch/"
SMALL = 16
"""Elements up to which constants are compared by value: torch_xla uploads a Python number again in every trace."""


NUM_FIRST = 3
"""Equal traces in a row before a call is replayed. The second trace may read tensors that the first has written; the
third is the first to follow two calls of the same kind."""
MAX_READING_SECONDS = 600.0


@dataclass(frozen=True)
class Recording:
    """A compiled graph, the sources of its inputs and the destinations of its outputs."""

    hash: bytes
    inputs: tuple[str, ...]
    """In the graph's order: the name of a tensor, SEED or CONSTANT."""
    constants: tuple[Tensor | None, ...] = field(repr=False)
    """Per input, its device tensor if it is a constant, else None."""
    numbers: tuple[Tensor | None, ...] = field(repr=False)
    """Per input, its host copy if it is a constant of at most SMALL elements, else None."""
    shardings: tuple[str, ...]
    """Shardings of the named tensors, in their order; empty outside spmd."""
    written: tuple[str, ...]
    """Held tensors that the first outputs of the graph replace; their buffers are donated."""
    leaves: tuple[Any, ...] = field(repr=False)
    """Leaves of the function's result: an Output, a Passed input, or a value that is the same in every call."""
    build: Callable[[list[Any]], Any] = field(repr=False)
    """Builds the function's result from its leaves."""

    def run(self, named: Named, inputs: Sequence[Tensor]) -> Any:
        """Queue the graph, replace the held tensors that it writes, and return the function's result."""
        results = torch_xla._XLAC._run_cached_graph(self.hash, list(inputs))
        for name, new in zip(self.written, results, strict=False):
            # Not copy_, which leaves a pending operation that the next trace of another program would include.
            torch_xla._XLAC._replace_xla_tensor(named[name], new)
        return self.build([self._leaf(leaf, results, named) for leaf in self.leaves])

    def _leaf(self, leaf: Any, results: Sequence[Tensor], named: Named) -> Any:
        if isinstance(leaf, Output):
            return results[leaf.index]
        return named[leaf.name] if isinstance(leaf, Passed) else leaf

    def replay(self, named: Named, *, device: str) -> Any:
        """Run with the current tensors and random state, and advance the random state as a traced call does."""
        state = torch_xla._XLAC
        values = [
            constant
            if constant is not None
            else state._get_base_seed_as_tensor(device)
            if name == SEED
            else named[name]
            for name, constant in zip(self.inputs, self.constants, strict=True)
        ]
        out = self.run(named, values)
        # The update of torch_xla.sync() after every program (torch/csrc/lazy/core/lazy_graph_executor.cpp, MarkStep).
        xm.set_rng_state((1012031 + state._xla_get_rng_seed() * 7012063) % 2**64, device)
        return out

    def fits(self, named: Named) -> bool:
        """Return whether the tensors have the shardings of the trace."""
        return self.shardings == shardings_of(named)


@dataclass(frozen=True)
class Output:
    """A leaf that the graph computes."""

    index: int


@dataclass(frozen=True)
class Passed:
    """A leaf that is an input, unchanged."""

    name: str


class Trace:
    """State before a trace, needed to record it: names, data handles and versions of the tensors."""

    def __init__(self, named: Named, *, held: Sequence[str]) -> None:
        self.named, self.held = named, held
        xm.wait_device_ops()  # outputs of the previous call have no data handle until it is dispatched
        self.names = dict(zip(handles_of(list(named.values())), named, strict=True))
        self.versions = [named[name]._version for name in held]
        # The seed is identified by its data handle, not by torch_xla's id for it: in a loop it gets that of a tensor.
        self.seed = torch_xla._XLAC._get_base_seed_as_tensor(str(torch_xla.device()))
        self.names |= dict.fromkeys(handles_of([self.seed]), SEED)

    def recorded(self, out: Any, *, checks_strays: bool) -> tuple[Recording, list[Tensor]] | None:
        """Return a recording of the pending graph, and its inputs; compiles it if it is in no cache.

        None where the graph is not the whole program: the function changed a device tensor that is not held.

        Args:
            out: the function's result.
            checks_strays: return None also if any other live device tensor has pending operations.
        """
        leaves, build = flattened(out)
        written = [name for name, is_new in zip(self.held, pending(self._held_tensors()), strict=True) if is_new]
        ordered = {_id(self.named[name]): self.named[name] for name in written}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ordered |= {_id(t): t for t, is_new in zip(tensors, pending(tensors), strict=True) if is_new}
        if len(ordered) == 0 or self._is_moved(written) or (checks_strays and has_strays(ordered)):
            return None
        _, values = torch_xla._XLAC._get_tensors_xla_device_data_node(list(ordered.values()))
        names = [self.names.get(handle, CONSTANT) for handle in handles_of(values)]
        for name, value in zip(names, values, strict=True):
            if name in written:
                torch_xla._XLAC._set_buffer_donation(value, True)
        with alias_with_buffer_donor_config():
            graph = torch_xla._XLAC._get_graph_hash(list(ordered.values()))
            torch_xla._XLAC._xla_warm_up_cache(list(ordered.values()), [])
        constants = tuple(v if name == CONSTANT else None for name, v in zip(names, values, strict=True))
        places = {number: index for index, number in enumerate(ordered)}
        recording = Recording(
            graph,
            inputs=tuple(names),
            constants=constants,
            numbers=small_on_host(constants),
            shardings=shardings_of(self.named),
            written=tuple(written),
            leaves=tuple(self._leaf(leaf, places) for leaf in leaves),
            build=build,
        )
        return recording, values

    def _held_tensors(self) -> list[Tensor]:
        return [self.named[name] for name in self.held]

    def _is_moved(self, written: Sequence[str]) -> bool:
        """Return whether a held tensor was written with device data, so that no operation is pending for it."""
        versions = zip(self.held, self.versions, strict=True)
        return any(self.named[name]._version != before for name, before in versions if name not in written)

    def _leaf(self, leaf: Any, places: Mapping[int, int]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if _id(leaf) in places:
            return Output(places[_id(leaf)])
        name = self.names.get(handles_of([leaf])[0])
        return leaf if name is None else Passed(name)


@dataclass(frozen=True)
class Change:
    """A difference between a trace and the trace before it."""

    number: str
    """The Python number that changed; empty where the graph changed."""
    num_replayed: int
    """Calls between the two traces, which replayed the former graph."""


class Calls:
    """Schedule of traces: which calls of one program, with inputs of one signature, are traced."""

    def __init__(self, *, every: int, differ: Callable[[Any, Any], str | None]) -> None:
        """Trace one call in `every` on average.

        Args:
            differ: compares two recordings; returns None where they are equal, an empty string where the graph differs,
                else the number that differs.
        """
        self.every, self.differ = every, differ
        self.num_traced = self.num_replayed = 0
        self.is_recorded = True
        """Whether traces can be recorded."""
        self._last: Any = None
        self._num_same = 0
        self._known: set[str] = set()
        """Programs right behind which a call was traced, and its graph was that of the others."""
        self._is_steady = every > 1
        self._random = random.Random(0)  # with a fixed seed, so that every start of a run traces the same calls
        self._interval = self._next_interval()

    def _next_interval(self) -> int:
        """Draw an interval in calls, uniform from 0.5 to 1.5 times `every`."""
        return self._random.randint(max(1, self.every // 2), self.every + self.every // 2)

    def replayable(self, after: str) -> Any:
        """Return the recording that stands for the next call, or None where the call has to be traced.

        Args:
            after: the program that was called before.
        """
        is_known = self._is_steady and self._num_same >= NUM_FIRST and after in self._known
        return self._last if is_known and self.num_replayed < self._interval - 1 else None

    def replayed(self) -> None:
        """Count a call that was replayed."""
        self.num_replayed += 1

    def traced(self, now: Any, after: str) -> Change | None:
        """Count a call that was traced and return what changed, once.

        Args:
            now: its recording; None where it could not be recorded.
            after: the program that was called before.
        """
        before, num_replayed = self._last, self.num_replayed
        self._last, self.num_replayed, self._interval = now, 0, self._next_interval()
        self.num_traced += 1
        if now is None:
            self.is_recorded = self._is_steady = False
            return None
        number = None if before is None else self.differ(before, now)
        self._num_same += 1
        self._known.add(after)
        if number is None or not self._is_steady:
            return None
        self._is_steady = False
        return Change(number, num_replayed)


class OutputReader:
    """Keeps the calls of a program at most one ahead of the thread that reads their outputs.

    Reading needs torch_xla's device lock, which replayed calls take again at once: the losses of ten steps were read
    ten steps late. The next call is queued while one is read, so the device has work.
    """

    def __init__(self) -> None:
        self._call, self._done = 0, threading.Event()
        self._done.set()

    def wait(self, call: int) -> None:
        """Block until the outputs of the call before the last are read, or their reading has failed."""
        if call > self._call + 1:
            self._done.wait(MAX_READING_SECONDS)

    def wrap(self, call: int, on_output: OnOutput) -> OnOutput:
        """Wrap `on_output`, which reads the outputs of call number `call`, so that `wait` is released at its end."""
        self._call, done = call, threading.Event()
        self._done = done

        def read(out: Any) -> None:
            try:
                on_output(out)
            finally:
                done.set()

        return read


class Replay:
    """The calls of one program, most of which replay the graph of an earlier trace."""

    def __init__(self, *, every: int, held: Held) -> None:
        self.every, self.held = every, held
        self.reader = OutputReader()
        self.dispatch_seconds = 0.0
        """CPU time of the calling thread in recording and dispatching graphs."""
        self._calls: dict[Signature, Calls] = {}

    @property
    def num_traced(self) -> int:
        """Number of calls so far that were traced."""
        return sum(calls.num_traced for calls in self._calls.values())

    @property
    def num_replayed(self) -> int:
        """Number of replayed calls since the last trace, summed over signatures."""
        return sum(calls.num_replayed for calls in self._calls.values())

    def call(
        self, signature: Signature, batch: Batch, *, function: Callable[[], Any], after: str
    ) -> tuple[Any, Change | None]:
        """Queue one call; return the function's result and what changed since the previous trace.

        Args:
            function: traces the program and returns its result.
            after: the program that was called before; the first call behind each is traced.
        """
        calls = self._calls.setdefault(signature, Calls(every=self.every, differ=differs))
        named = named_tensors(batch, self.held())
        known = calls.replayable(after)
        started = time.thread_time()
        if known is not None and known.fits(named):
            out = known.replay(named, device=str(torch_xla.device()))
            calls.replayed()
            self.dispatch_seconds += time.thread_time() - started
            return out, None
        trace = Trace(named, held=list(self.held())) if calls.is_recorded else None
        drawn = host_random_state()
        out = function()
        started = time.thread_time()
        is_drawn = host_random_state() != drawn
        found = None
        if trace is not None and not is_drawn:
            found = trace.recorded(out, checks_strays=calls.num_traced == 0)
        change = calls.traced(None if found is None else found[0], after)
        if trace is not None and found is not None:
            recording, inputs = found
            out = recording.run(trace.named, inputs)
        torch_xla.sync()
        self.dispatch_seconds += time.thread_time() - started
        return out, change


def host_random_state() -> tuple[object, ...]:
    """Return the states of the host's random generators; a function that uses them is never replayed."""
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), position


def named_tensors(batch: Named, held: Named) -> dict[str, Tensor]:
    """Return the tensors that a program may read and that change between calls; runs pending operations."""
    named = {**held, **{BATCH + name: tensor for name, tensor in batch.items()}}
    if any(pending(list(named.values()))):
        torch_xla.sync()
    return named


def differs(before: Recording, now: Recording) -> str | None:
    """Describe how two traces differ: None if equal, empty for another graph, else the changed number."""
    if before.hash != now.hash or before.inputs != now.inputs or before.written != now.written:
        return ""
    for old, new, was, is_now in zip(before.constants, now.constants, before.numbers, now.numbers, strict=True):
        if was is not None and is_now is not None:
            if not torch.equal(was, is_now):
                return f"{_shown(was)} became {_shown(is_now)}"
        elif old is not None and new is not None and handles_of([old]) != handles_of([new]):
            return f"another tensor of shape {tuple(new.shape)}"
    return None


def has_strays(known: Mapping[int, Tensor]) -> bool:
    """Return whether any live device tensor but `known` and their bases has pending operations.

    Bases are exempt since they are alive as long as a view of them is.
    """
    bases = {_id(tensor._base) for tensor in known.values() if tensor._base is not None}
    found = [o for o in gc.get_objects() if type(o) in (Tensor, torch.nn.Parameter) and is_on_xla(o)]
    return any(
        is_new and _id(tensor) not in {*known, *bases} for tensor, is_new in zip(found, pending(found), strict=True)
    )


def is_on_xla(tensor: Tensor) -> bool:
    """Return whether a tensor is the device's; an undefined one (of a released autograd node) is nobody's."""
    try:
        return tensor.device.type == "xla"
    except RuntimeError:  # "tensor does not have a device"
        return False


def pending(tensors: list[Tensor]) -> list[bool]:
    """Return, for each tensor, whether it has pending operations."""
    return list(torch_xla._XLAC._check_tensor_need_materialization(tensors))


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return, for each tensor, the handle of its data on the device."""
    return list(torch_xla._XLAC._get_tensors_handle(list(tensors)))


def small_on_host(constants: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Copy the constants of at most SMALL elements to the host in one transfer; None for the others."""
    small = [c for c in constants if c is not None and c.numel() <= SMALL]
    values = iter(torch_xla._XLAC._xla_get_cpu_tensors(small) if small else ())
    return tuple(None if c is None or c.numel() > SMALL else next(values) for c in constants)


def shardings_of(named: Named) -> tuple[str, ...]:
    """Return the sharding of each tensor; empty outside spmd."""
    return tuple(torch_xla._XLAC._get_xla_sharding_specs(list(named.values()))) if xr.is_spmd() else ()


def _id(tensor: Tensor) -> int:
    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def _shown(value: Tensor) -> str:
    shown = value.tolist()
    return f"{shown:.6g}" if isinstance(shown, float) else str(shown)
