"""Replay: run the graph of an earlier trace instead of having Python build it again.

Tracing an unrolled 7B step takes Python 1.3 s where the device takes 0.55 s. The graph is the same at every step as
long as what the function computes depends on tensors alone, so it is recorded, compared over three traces, and then run
by its hash, as torch_xla's bridge for torch.compile does (torch_xla 2.9, _dynamo/dynamo_bridge.py). `torch_xla.sync()`
compiles under a hash that it tells nobody, and what it finds alive on the device is part of its program; a recorded
program is what its function returns and the held tensors that it writes.

Later traces come at irregular intervals, so that a change with a period is met sooner or later. That is a check, not a
proof: `config/tracing.py` allows replay for the steps of this project only.
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
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from tpu_experiments.runtime.base import Batch, Held
from tpu_experiments.runtime.signature import Signature

Named = Mapping[str, Tensor]
SEED = "(seed)"
CONSTANT = "(constant)"
BATCH = "batch/"
SMALL = 16
"""Elements up to which two constants are the same by value; torch_xla sends a Python number anew in every trace."""


NUM_FIRST = 3
"""Traces in a row that must be the same before a call is replayed. The second may find tensors that the first wrote,
the third is the first that comes after two calls of one kind."""
MAX_READING_SECONDS = 600.0


@dataclass(frozen=True)
class Recording:
    """A graph, where its inputs come from and where its outputs go."""

    hash: bytes
    inputs: tuple[str, ...]
    """In the graph's order: name of a tensor, SEED or CONSTANT."""
    constants: tuple[Tensor | None, ...] = field(repr=False)
    """On the device, for each input that is a constant."""
    numbers: tuple[Tensor | None, ...] = field(repr=False)
    """On the host, for each constant that is small."""
    shardings: tuple[str, ...]
    """Of the named tensors, in their order (spmd)."""
    written: tuple[str, ...]
    """Held tensors that get the first outputs of the graph; they are donated."""
    leaves: tuple[Any, ...] = field(repr=False)
    """Of the function's result: an output's index, the name of an input, or what is the same in every call."""
    build: Callable[[list[Any]], Any] = field(repr=False)
    """From leaves to the function's result."""

    def run(self, named: Named, inputs: Sequence[Tensor]) -> Any:
        """Queue the graph; held tensors are written. The function's result."""
        results = torch_xla._XLAC._run_cached_graph(self.hash, list(inputs))
        for name, new in zip(self.written, results, strict=False):
            # Not copy_, which leaves an operation pending that the next trace of another program would take in.
            torch_xla._XLAC._replace_xla_tensor(named[name], new)
        return self.build([self._leaf(leaf, results, named) for leaf in self.leaves])

    def _leaf(self, leaf: Any, results: Sequence[Tensor], named: Named) -> Any:
        if isinstance(leaf, Output):
            return results[leaf.index]
        return named[leaf.name] if isinstance(leaf, Passed) else leaf

    def replay(self, named: Named, *, device: str) -> Any:
        """As `run`, with the tensors of now and the random state of now, which then moves on as after a trace."""
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
        # What torch_xla.sync() does after every program (torch/csrc/lazy/core/lazy_graph_executor.cpp, MarkStep).
        xm.set_rng_state((1012031 + state._xla_get_rng_seed() * 7012063) % 2**64, device)
        return out

    def fits(self, named: Named) -> bool:
        """Whether the tensors lie on the devices as in the trace."""
        return self.shardings == shardings_of(named)


@dataclass(frozen=True)
class Output:
    """A leaf that the graph computes."""

    index: int


@dataclass(frozen=True)
class Passed:
    """A leaf that is an input as it came."""

    name: str


class Trace:
    """What is known before a program is traced."""

    def __init__(self, named: Named, *, held: Sequence[str]) -> None:
        self.named, self.held = named, held
        xm.wait_device_ops()  # until the call before is handed to the device, its outputs have no data to look at
        self.names = dict(zip(handles_of(list(named.values())), named, strict=True))
        self.versions = [named[name]._version for name in held]
        # By its data, not by the number that torch_xla gives it: a loop that reads it numbers it as a tensor.
        self.seed = torch_xla._XLAC._get_base_seed_as_tensor(str(torch_xla.device()))
        self.names |= dict.fromkeys(handles_of([self.seed]), SEED)

    def recorded(self, out: Any, *, looks_for_strays: bool) -> tuple[Recording, list[Tensor]] | None:
        """The graph that is pending, and its inputs; compiled where it is in no cache.

        None where the graph is not all of the program: the function changed a tensor on the device that is not held.
        """
        leaves, build = opened(out)
        written = [name for name, is_new in zip(self.held, pending(self._held_tensors()), strict=True) if is_new]
        ordered = {_id(self.named[name]): self.named[name] for name in written}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ordered |= {_id(t): t for t, is_new in zip(tensors, pending(tensors), strict=True) if is_new}
        if len(ordered) == 0 or self._is_moved(written) or (looks_for_strays and strays(ordered)):
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
            numbers=on_host(constants),
            shardings=shardings_of(self.named),
            written=tuple(written),
            leaves=tuple(self._leaf(leaf, places) for leaf in leaves),
            build=build,
        )
        return recording, values

    def _held_tensors(self) -> list[Tensor]:
        return [self.named[name] for name in self.held]

    def _is_moved(self, written: Sequence[str]) -> bool:
        """Whether a held tensor was written without an operation, with what is on the device already."""
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
    """Calls between the two traces, which ran the former graph."""


class Calls:
    """Decide which calls of one program with inputs of one signature are traced."""

    def __init__(self, *, every: int, differ: Callable[[Any, Any], str | None]) -> None:
        """Trace one call in `every` on average.

        Args:
            differ: compares two recordings; None where they are the same, empty where the graph differs, else the
                number that differs.
        """
        self.every, self.differ = every, differ
        self.num_traced = self.num_replayed = 0
        self.is_recorded = True
        """Whether a trace can be kept."""
        self._last: Any = None
        self._num_same = 0
        self._is_steady = every > 1
        self._random = random.Random(0)  # of its own: the same calls are traced in every life of a run
        self._interval = self._next_interval()

    def _next_interval(self) -> int:
        """Draw a number of calls from half of `every` to three halves of it."""
        return self._random.randint(max(1, self.every // 2), self.every + self.every // 2)

    def replayable(self) -> Any:
        """Return the recording that stands for the next call, or None where the call has to be traced."""
        is_known = self._is_steady and self._num_same >= NUM_FIRST and self.num_replayed < self._interval - 1
        return self._last if is_known else None

    def replayed(self) -> None:
        """Count a call that was replayed."""
        self.num_replayed += 1

    def traced(self, now: Any) -> Change | None:
        """Count a call that was traced and return what changed, once.

        Args:
            now: its recording, None where it cannot be kept.
        """
        before, num_replayed = self._last, self.num_replayed
        self._last, self.num_replayed, self._interval = now, 0, self._next_interval()
        self.num_traced += 1
        if now is None:
            self.is_recorded = self._is_steady = False
            return None
        number = None if before is None else self.differ(before, now)
        self._num_same += 1
        if number is None or not self._is_steady:
            return None
        self._is_steady = False
        return Change(number, num_replayed)


class Reader:
    """Keep the calls of a program at most one ahead of the thread that reads their outputs.

    Reading needs torch_xla's lock of the device, which calls that are not traced take again at once: the loss of ten
    steps was read ten steps late. The call after the one that is read is queued meanwhile, so the device has work.
    """

    def __init__(self) -> None:
        self._call, self._done = 0, threading.Event()
        self._done.set()

    def wait(self, call: int) -> None:
        """Wait until the outputs of the call before the last are read; a reading that failed is not waited for."""
        if call > self._call + 1:
            self._done.wait(MAX_READING_SECONDS)

    def of(self, call: int, then: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap `then`, which reads the outputs of the call of this number, so that `wait` sees it end."""
        self._call, done = call, threading.Event()
        self._done = done

        def read(out: Any) -> None:
            try:
                then(out)
            finally:
                done.set()

        return read


class Replay:
    """The calls of one program, of which most run the graph of an earlier trace."""

    def __init__(self, *, every: int, held: Held) -> None:
        self.every, self.held = every, held
        self.reader = Reader()
        self.dispatch_seconds = 0.0
        """CPU time of the calling thread in recording graphs and handing them over."""
        self._calls: dict[Signature, Calls] = {}

    @property
    def num_traced(self) -> int:
        """Number of calls so far for which the function ran."""
        return sum(calls.num_traced for calls in self._calls.values())

    @property
    def num_replayed(self) -> int:
        """Number of calls since the last trace of each signature for which it did not."""
        return sum(calls.num_replayed for calls in self._calls.values())

    def call(
        self, signature: Signature, batch: Batch, *, function: Callable[[], Any], may_replay: bool
    ) -> tuple[Any, Change | None]:
        """Queue one call; return the function's result and what changed since the trace before.

        Args:
            function: traces the program.
            may_replay: False for the first call after another program, which is traced.
        """
        calls = self._calls.setdefault(signature, Calls(every=self.every, differ=differs))
        named = named_tensors(batch, self.held())
        known = calls.replayable() if may_replay else None
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
            found = trace.recorded(out, looks_for_strays=calls.num_traced == 0)
        change = calls.traced(None if found is None else found[0])
        if trace is not None and found is not None:
            recording, inputs = found
            out = recording.run(trace.named, inputs)
        torch_xla.sync()
        self.dispatch_seconds += time.thread_time() - started
        return out, change


def host_random_state() -> tuple[object, ...]:
    """Return the states of the host's random generators; a function that draws from them is never replayed."""
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), position


def named_tensors(batch: Named, held: Named) -> dict[str, Tensor]:
    """All that a program may read and that differs between calls, with nothing pending on it."""
    named = {**held, **{BATCH + name: tensor for name, tensor in batch.items()}}
    if any(pending(list(named.values()))):
        torch_xla.sync()
    return named


def differs(before: Recording, now: Recording) -> str | None:
    """What differs between two traces so that one does not stand for the other: empty for the graph, else a number."""
    if before.hash != now.hash or before.inputs != now.inputs or before.written != now.written:
        return ""
    for old, new, was, is_now in zip(before.constants, now.constants, before.numbers, now.numbers, strict=True):
        if was is not None and is_now is not None:
            if not torch.equal(was, is_now):
                return f"{_shown(was)} became {_shown(is_now)}"
        elif old is not None and new is not None and handles_of([old]) != handles_of([new]):
            return f"another tensor of shape {tuple(new.shape)}"
    return None


def opened(out: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Leaves of a result and what makes one of them; a dataclass is opened by its fields."""
    kind = type(out) if hasattr(out, "__dataclass_fields__") else None
    leaves, spec = tree_flatten(vars(out) if kind else out)

    def build(new: list[Any]) -> Any:
        made = tree_unflatten(new, spec)
        return kind(**made) if kind else made

    return leaves, build


def strays(known: Mapping[int, Tensor]) -> bool:
    """Whether tensors on the device that Python holds wait for a program, are none of `known`, and none of their bases,
    which are alive as long as a view of them is."""
    bases = {_id(tensor._base) for tensor in known.values() if tensor._base is not None}
    found = [o for o in gc.get_objects() if type(o) in (Tensor, torch.nn.Parameter) and o.device.type == "xla"]
    return any(
        is_new and _id(tensor) not in {*known, *bases} for tensor, is_new in zip(found, pending(found), strict=True)
    )


def pending(tensors: list[Tensor]) -> list[bool]:
    """Of each, whether an operation waits to be run for it."""
    return list(torch_xla._XLAC._check_tensor_need_materialization(tensors))


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """Of each, where its data lies on the device."""
    return list(torch_xla._XLAC._get_tensors_handle(list(tensors)))


def on_host(constants: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The values of those that are small, brought in one transfer."""
    small = [c for c in constants if c is not None and c.numel() <= SMALL]
    values = iter(torch_xla._XLAC._xla_get_cpu_tensors(small) if small else ())
    return tuple(None if c is None or c.numel() > SMALL else next(values) for c in constants)


def shardings_of(named: Named) -> tuple[str, ...]:
    """Of each tensor, where it lies; empty outside of spmd."""
    return tuple(torch_xla._XLAC._get_xla_sharding_specs(list(named.values()))) if xr.is_spmd() else ()


def _id(tensor: Tensor) -> int:
    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def _shown(value: Tensor) -> str:
    shown = value.tolist()
    return f"{shown:.6g}" if isinstance(shown, float) else str(shown)
