"""Programs on torch_xla, and the watch over what is compiled for them: nothing new after the first calls.

A run's programs are known before its first step. A batch of another shape is refused before it is traced. A program
that is compiled again for inputs it had before holds a value that Python computed: that is found after the fact, so
its step is done, and the next call refuses and names the value, by comparing the texts (HLO) of both programs."""

import logging
import queue
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tpu_experiments.runtime.base import (
    Batch,
    CompileCache,
    Counters,
    Held,
    OnOutput,
    Out,
    Shape,
    Signature,
    UnexpectedProgram,
    difference,
    leading_shape,
    shape_text,
    signature_of,
    signature_text,
)
from tpu_experiments.runtime.xla.host_reads import NoHostReads
from tpu_experiments.runtime.xla.replay import Change, Replay

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*)$")
KIND = re.compile(r"^(\S+) ([\w-]+)\(")
METADATA = re.compile(r", metadata=\{[^}]*\}")
PLACE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
OPERAND = re.compile(r"%[\w.-]+")
FOLLOWERS = {"tuple", "get-tuple-element", "while", "call", "conditional"}
"""Opcodes that are left out: their types contain those of their operands, so they change with any instruction."""
MAX_SHOWN = 3


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction without names, so that it can be compared between programs."""

    type: str
    opcode: str
    text: str


def changed_values(before: str, now: str) -> str:
    """Describe up to three differences between two HLO texts; empty where there are none.

    For example `f32[] constant(2.5) became f32[] constant(3.5) (lab.py:14)`. The source line is from the metadata of
    `now`, which torch_xla writes in its IR debug mode. A line in an installed package is left out: it would identify
    the operation and not the user's code.
    """
    old, new = instructions(before), instructions(now)
    gone, come = Counter(i for i, _ in old), Counter(i for i, _ in new)
    places = {instruction: place for instruction, place in new if place}
    added = sorted((come - gone).elements(), key=_rank)
    removed = sorted((gone - come).elements(), key=_rank)
    shown = []
    for instruction in added:
        place = f" ({places[instruction]})" if instruction in places else ""
        partner = next((i for i in removed if (i.type, i.opcode) == (instruction.type, instruction.opcode)), None)
        if partner is not None:
            removed.remove(partner)
        change_text = f"{partner.text} became {instruction.text}" if partner else f"{instruction.text} is new"
        shown.append((_rank(instruction)[0], not place, f"{change_text}{place}"))
    shown += [(_rank(instruction)[0], True, f"{instruction.text} is gone") for instruction in removed]
    return "; ".join([change_text for *_, change_text in sorted(dict.fromkeys(shown))][:MAX_SHOWN])


def instructions(hlo: str) -> list[tuple[Instruction, str]]:
    """Return every instruction outside FOLLOWERS, each with its Python source line or an empty string."""
    found = []
    for line in hlo.splitlines():
        match = INSTRUCTION.match(line)
        kind = KIND.match(match[1]) if match else None
        if match is None or kind is None or kind[2] in FOLLOWERS:
            continue
        text = " ".join(OPERAND.sub("", METADATA.sub("", match[1])).replace(" ,", ",").replace(" )", ")").split())
        if kind[2] == "parameter":
            text = f"an input {kind[1]}"
        found.append((Instruction(kind[1], kind[2], text), _place(match[1])))
    return found


def _place(line: str) -> str:
    """Return `folder/file.py:14`, or an empty string for a line in an installed package."""
    found = PLACE.search(line)
    if found is None or "site-packages" in found[1]:
        return ""
    return f"{'/'.join(found[1].split('/')[-2:])}:{found[2]}"


def _rank(instruction: Instruction) -> tuple[int, str]:
    """Return a sort key by how much a change explains: constants, attributes, others, then inputs."""
    has_attributes = "={" in instruction.text or "=[" in instruction.text
    order = 0 if instruction.opcode == "constant" else 1 if has_attributes else 2
    order = 3 if instruction.opcode == "parameter" else order
    return order, instruction.text


class Closures:
    """A thread that starts with the first closure and runs until the process ends.

    It keeps no reference to a closure that has run.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, closure: Callable[[], object]) -> None:
        """Queue a closure behind the earlier ones.

        Raises:
            BaseException: the error of an earlier closure, once.
        """
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="closures", daemon=True)
            self._thread.start()
        self._queue.put(closure)

    def wait(self) -> None:
        """Block until all queued closures have run.

        Raises:
            BaseException: the error of one of them, once.
        """
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            closure = self._queue.get()
            try:
                closure()
            except BaseException as error:
                self._error = self._error or error
            del closure  # else the tensors that it references live until the next one is queued


log = logging.getLogger(__name__)
REMEDY = "let it compile with trainer.on_recompile=warn"


class Compiles:
    """Counts of this process's compilations, and which of them were expected."""

    def __init__(self, *, policy: str, cache_folder: str | None = None, trace_every: int = 1) -> None:
        self.policy, self.cache_folder, self.trace_every = policy, cache_folder, trace_every
        self.shapes: dict[str, set[Shape]] = {}
        self.trace_seconds = self.dispatch_seconds = 0.0
        self.is_profiled = False
        self._warmup: int | None = None
        self._last: tuple[str, int] = ("", 0)
        self._gaps: set[tuple[str, str]] = set()
        self._waiting: UnexpectedProgram | None = None

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None:
        """Restrict the programs of these names to these shapes of token ids."""
        self.shapes = {name: set(of_name) for name, of_name in shapes.items()}

    def before(self, name: str) -> int:
        """Return the number of compilations before a call of the program `name`.

        The first time that one program follows another, operations between them may compile; later they may not.

        Raises:
            UnexpectedProgram: an earlier complaint, or such an operation was compiled.
        """
        num, (last, num_then) = num_compiles(), self._last
        if self._warmup is None:
            self._warmup, num_then = num, num
        if num > num_then and (last, name) in self._gaps:
            self.warn_or_raise(f"{num - num_then} program(s) were compiled between {last} and {name}: {OUTSIDE}")
        elif num > num_then:
            self._warmup += num - num_then
        self._gaps.add((last, name))
        if self._waiting is not None:
            found, self._waiting = self._waiting, None
            raise found
        return num

    @property
    def last(self) -> str:
        """Name of the program that was called last; empty before the first call."""
        return self._last[0]

    def after(self, name: str, *, num_before: int, is_warmup: bool) -> int:
        """Count and return the compilations of a call; those of a warm-up call are expected."""
        num = num_compiles()
        if is_warmup and self._warmup is not None:
            self._warmup += num - num_before
        self._last = (name, num)
        return num - num_before

    def warn_or_raise(self, text: str, *, explain: Callable[[], str] | None = None) -> None:
        """Log the text as a warning, or make the next call of a program raise it, as the policy says."""
        if self.policy == "warn":
            log.warning("%s", text)
        elif self._waiting is None:
            self._waiting = UnexpectedProgram(f"{text}, or {REMEDY}", explain=explain)

    def counters(self) -> Counters:
        """Return the compiler activity so far."""
        num = num_compiles()
        return Counters(
            num_compiles=num,
            compiles_after_warmup=0 if self._warmup is None else num - self._warmup,
            compile_seconds=_compile_seconds(),
            trace_seconds=self.trace_seconds,
            dispatch_seconds=self.dispatch_seconds,
            cache=self.cache(),
        )

    def cache(self) -> CompileCache | None:
        """Return hits and misses of the persistent compile cache, from torch_xla's counters; None without one."""
        if self.cache_folder is None:
            return None
        kinds = ("Hit", "Miss", "DeserializeFailure")
        return CompileCache(self.cache_folder, *(int(met.counter_value(f"PersistentCache{k}") or 0) for k in kinds))


OUTSIDE = (
    "an operation on a tensor of the device in code of your own; bring tensors to the host with .cpu() before you "
    "compute with them, or compute inside of runtime.program"
)


class XlaProgram(Generic[Out]):
    """A function of a batch, compiled into one program per signature.

    With `trace_every=1` each call is traced and dispatched without waiting for the device, which runs the previous call
    meanwhile; nothing is recorded. Above 1, most calls replay the graph of an earlier trace (`replay.py`).
    """

    def __init__(
        self,
        function: Callable[[Batch], Out],
        *,
        name: str,
        compiles: Compiles,
        held: Held = dict,
        closures: Closures | None = None,
    ) -> None:
        self.function, self.name, self.compiles, self.held = function, name, compiles, held
        self.closures = closures or Closures()
        self.replay = Replay(every=compiles.trace_every, held=held) if compiles.trace_every > 1 else None
        self.num_traced = 0
        """Calls so far for which the Python function ran."""
        self._texts: dict[Signature, bytes] = {}
        self._num_calls = 0
        self._places: list[int] = []
        """Identities of the held tensors at the last call."""
        self._is_reported = self._is_explained = self._is_replayed = False

    def __call__(self, batch: Batch, *, on_output: OnOutput | None = None) -> Out:
        if not self.compiles.is_profiled:
            return self._call(batch, on_output=on_output)
        # Not torch_xla's StepTrace: its scope is part of the program, which would be compiled again.
        with torch_xla._XLAC.profiler.TraceMe(self.name, _r=1, step_num=self._num_calls + 1):
            return self._call(batch, on_output=on_output)

    def _call(self, batch: Batch, *, on_output: OnOutput | None) -> Out:
        replay, change = self.replay, None
        if replay is not None:
            replay.reader.wait(self._num_calls)
            on_output = on_output and replay.reader.wrap(self._num_calls, on_output)
        after = self.compiles.last
        num_before = self.compiles.before(self.name)
        signature = signature_of(batch)
        is_first = signature not in self._texts
        is_warmup = is_first and self._is_admitted(signature)
        what, compile_seconds = f"{self.name} {shape_text(leading_shape(signature))}", 0.0
        if is_first:
            log.info("%s: compiling", what)
            compile_seconds = _compile_seconds()
        places = [id(tensor) for tensor in self.held().values()]
        if is_first or places != self._places:  # loading a checkpoint replaces the held tensors
            run_what_is_pending()
        self._places = places
        trace = partial(self._traced, batch, signature)
        if replay is None:
            out = trace()
            started = time.thread_time()
            torch_xla.sync()
            self.compiles.dispatch_seconds += time.thread_time() - started
        else:
            num_traced, before = self.num_traced, replay.dispatch_seconds
            out, change = replay.call(signature, batch, function=trace, after=after)
            self.compiles.dispatch_seconds += replay.dispatch_seconds - before
            if self.num_traced == num_traced and not self._is_replayed:
                self._is_replayed = True
                log.info(
                    "%s: from now on one call in %d on average is traced, and the others are replayed",
                    self.name,
                    replay.every,
                )
        if on_output is not None:
            self.closures.run(partial(on_output, out))
        self._num_calls += 1
        compiled = self.compiles.after(self.name, num_before=num_before, is_warmup=is_warmup)
        if is_first:
            log.info("%s: compiled %d program(s) in %.1f s", what, compiled, _compile_seconds() - compile_seconds)
        elif (compiled and not is_warmup) or change is not None:
            self._report_change(batch, signature, compiled=compiled, change=change)
        return out

    def _is_admitted(self, signature: Signature) -> bool:
        """Return whether a new signature is one that was expected; warn if it is not.

        Raises:
            UnexpectedProgram: it is not, and the policy is `error`; nothing was run on the batch.
        """
        shape, expected = leading_shape(signature), self.compiles.shapes.get(self.name)
        if expected is None or (shape in expected and shape not in map(leading_shape, self._texts)):
            return True
        changed = difference(signature, seen=self._texts, expected=expected)
        text = f"{self.name} would be compiled again: {changed}; pad or cut batches to a shape that is compiled"
        if self.compiles.policy == "error":
            raise UnexpectedProgram(f"{text}, or {REMEDY}")
        log.warning("%s", text)
        return False

    def _traced(self, batch: Batch, signature: Signature) -> Out:
        """Trace a call; keep the HLO of the first trace, and compare with it once after a warning."""
        self.num_traced += 1
        is_known = signature in self._texts
        if is_known and self._is_reported and not self._is_explained:
            self._is_explained = True
            out, changes = self._compare_with_first(batch, signature)
            log.warning("%s: %s", self.name, changes or "its constants are unchanged")
            return out
        started = time.perf_counter()
        with NoHostReads(self.name, device_type="xla", count_reads=num_reads):
            out = self.function(batch)
        self.compiles.trace_seconds += time.perf_counter() - started
        if not is_known:
            self._texts[signature] = zlib.compress(hlo_of(out).encode(), level=1)
        return out

    def _compare_with_first(self, batch: Batch, signature: Signature) -> tuple[Out, str]:
        """Trace with source lines; return the result and the differences from this signature's first HLO."""
        torch_xla._XLAC._set_ir_debug(True)  # records a source line for every operation, which is slow
        try:
            out = self.function(batch)  # without NoHostReads, whose own lines would be recorded
            now = hlo_of(out)
        finally:
            torch_xla._XLAC._set_ir_debug(False)
        return out, changed_values(zlib.decompress(self._texts[signature]).decode(), now)

    def _report_change(self, batch: Batch, signature: Signature, *, compiled: int, change: Change | None) -> None:
        """Complain once that the program has changed; with `warn` the next trace logs which value it was."""
        num_replayed = change.num_replayed if change is not None else 0
        late = f"; the {num_replayed} calls before it were not traced and ran with the former" if num_replayed else ""
        if change is not None and change.number:
            self._report_changed_number(change.number, late=late)
        elif not self._is_reported and (compiled or late):
            self._is_reported = True
            text = (
                f"{self.name} was {'compiled again' if compiled else 'another program'} at its call {self._num_calls} "
                f"though its inputs are as before ({signature_text(signature)}), so a value that Python computes is "
                f"part of the program and has changed{late}; make it a tensor of the batch or of the device"
            )
            self.compiles.warn_or_raise(text, explain=lambda: self._compare_with_first(batch, signature)[1])

    def _report_changed_number(self, number: str, *, late: str) -> None:
        """Report a changed Python number that is an input of the program.

        It causes no recompilation, but every call has to be traced.
        """
        text = f"a number that Python hands to {self.name} has changed at its call {self._num_calls} ({number})"
        if late:
            self.compiles.warn_or_raise(
                f"{text}{late}; make it a tensor of the batch or of the device, or trace every call with "
                "trainer.trace_every_steps=1"
            )
            return
        log.warning(
            "%s, so every call of it is traced; make it a tensor of the batch or of the device, and one call in %d is",
            text,
            self.compiles.trace_every,
        )


def run_what_is_pending() -> None:
    """Run pending operations, such as zeroing a buffer, which would else be part of the next program.

    The random state is restored afterwards.
    """
    device = str(torch_xla.device())
    state = torch_xla._XLAC._xla_get_rng_seed()
    torch_xla.sync()
    xm.set_rng_state(state, device)  # a sync advances it


def num_reads() -> int:
    """Return the number of operations so far that fell back to the host's CPU, each after a transfer."""
    return int(torch_xla._XLAC._xla_counter_value("xla::_to_cpu") or 0)


def hlo_of(out: Any) -> str:
    """Return the HLO text of the program that is pending for these outputs."""
    leaves = tree_flatten(vars(out) if hasattr(out, "__dataclass_fields__") else out)[0]
    return str(torch_xla._XLAC._get_xla_tensors_hlo([leaf for leaf in leaves if isinstance(leaf, Tensor)]))


def num_compiles() -> int:
    """Return the number of programs compiled in this process so far."""
    data = met.metric_data("CompileTime")
    return int(data[0]) if data else 0


def _compile_seconds() -> float:
    data = met.metric_data("CompileTime")
    return float(data[1]) / 1e9 if data else 0.0  # the metric counts nanoseconds
