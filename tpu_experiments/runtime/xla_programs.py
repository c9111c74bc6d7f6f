"""Programs on torch_xla, and the watch over what is compiled for them: nothing new after the first calls.

A run's programs are known before its first step. A batch of another shape is refused before it is traced. A program
that is compiled again for inputs it had before holds a value that Python computed: that is found after the fact, so its
step is done, and the next call refuses.
"""

import logging
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Generic

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tpu_experiments.runtime.baked import changed_values
from tpu_experiments.runtime.base import Batch, CompileCache, Counters, Out, UnexpectedProgram
from tpu_experiments.runtime.signature import (
    Shape,
    Signature,
    difference,
    leading_shape,
    shape_text,
    signature_of,
    signature_text,
)

log = logging.getLogger(__name__)
REMEDY = "let it compile with trainer.on_recompile=warn"


class Compiles:
    """What was compiled in this process, and what of it was to be expected."""

    def __init__(self, *, policy: str, cache_folder: str | None = None) -> None:
        self.policy, self.cache_folder = policy, cache_folder
        self.shapes: dict[str, set[Shape]] = {}
        self.trace_seconds = self.dispatch_seconds = 0.0
        self.is_profiled = False
        self._warmup: int | None = None
        self._last: tuple[str, int] = ("", 0)
        self._gaps: set[tuple[str, str]] = set()
        self._waiting: UnexpectedProgram | None = None

    def expect(self, shapes: Mapping[str, set[Shape]]) -> None:
        """From now on the programs of these names take these shapes of token ids and no other."""
        self.shapes = {name: set(of_name) for name, of_name in shapes.items()}

    def before(self, name: str) -> int:
        """Compiles before a call of the program `name`.

        The first time that one program follows another, what lies between them may compile; later it may not.

        Raises:
            UnexpectedProgram: something was compiled that should not have been.
        """
        num, (last, num_then) = num_compiles(), self._last
        if self._warmup is None:
            self._warmup, num_then = num, num
        if num > num_then and (last, name) in self._gaps:
            self.complain(f"{num - num_then} program(s) were compiled between {last} and {name}: {OUTSIDE}")
        elif num > num_then:
            self._warmup += num - num_then
        self._gaps.add((last, name))
        if self._waiting is not None:
            found, self._waiting = self._waiting, None
            raise found
        return num

    def after(self, name: str, *, num_before: int, is_warmup: bool) -> int:
        """Count what a call compiled."""
        num = num_compiles()
        if is_warmup and self._warmup is not None:
            self._warmup += num - num_before
        self._last = (name, num)
        return num - num_before

    def complain(self, text: str, *, explain: Callable[[], str] | None = None) -> None:
        """Have the next call raise it, or warn."""
        if self.policy == "warn":
            log.warning("%s", text)
        elif self._waiting is None:
            self._waiting = UnexpectedProgram(f"{text}, or {REMEDY}", explain=explain)

    def counters(self) -> Counters:
        """Compiler activity so far."""
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
        """What the folder of compiled programs was good for; torch_xla counts it."""
        if self.cache_folder is None:
            return None
        kinds = ("Hit", "Miss", "DeserializeFailure")
        return CompileCache(self.cache_folder, *(int(met.counter_value(f"PersistentCache{k}") or 0) for k in kinds))


OUTSIDE = (
    "an operation on a tensor of the device in code of your own; bring tensors to the host with .cpu() before you "
    "compute with them, or compute inside of runtime.program"
)


class XlaProgram(Generic[Out]):
    """A function of a batch as one compiled program per signature."""

    def __init__(self, function: Callable[[Batch], Out], *, name: str, compiles: Compiles) -> None:
        self.function, self.name, self.compiles = function, name, compiles
        self._texts: dict[Signature, bytes] = {}
        self._num_calls = 0
        self._is_told = self._is_explained = False

    def __call__(self, batch: Batch, *, then: Callable[[Any], None] | None = None) -> Out:
        if not self.compiles.is_profiled:
            return self._call(batch, then=then)
        # Not torch_xla's StepTrace: its scope would be part of the program, which would be compiled again.
        with torch_xla._XLAC.profiler.TraceMe(self.name, _r=1, step_num=self._num_calls + 1):
            return self._call(batch, then=then)

    def _call(self, batch: Batch, *, then: Callable[[Any], None] | None) -> Out:
        num_before = self.compiles.before(self.name)
        signature = signature_of(batch)
        is_first = signature not in self._texts
        is_warmup = is_first and self._is_admitted(signature)
        out = self._traced(batch, signature)
        if then is not None:
            xm.add_step_closure(then, args=(out,), run_async=True)
        started = time.thread_time()
        torch_xla.sync()
        self.compiles.dispatch_seconds += time.thread_time() - started
        self._num_calls += 1
        compiled = self.compiles.after(self.name, num_before=num_before, is_warmup=is_warmup)
        if is_first:
            log.info("%s %s: compiled %d program(s)", self.name, shape_text(leading_shape(signature)), compiled)
        elif compiled and not self._is_told:
            self._tell(batch, signature)
        return out

    def _is_admitted(self, signature: Signature) -> bool:
        """Whether a new signature is one that the run was known to need.

        Raises:
            UnexpectedProgram: under `error`; the batch was not touched.
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
        """Trace; the first time keep the program's text, after a complaint that only warned compare with it."""
        is_known = signature in self._texts
        if is_known and self._is_told and not self._is_explained:
            self._is_explained = True
            out, changes = self._compared(batch, signature)
            log.warning("%s: %s", self.name, changes or "its constants are as at first")
            return out
        started = time.perf_counter()
        out = self.function(batch)
        self.compiles.trace_seconds += time.perf_counter() - started
        if not is_known:
            self._texts[signature] = zlib.compress(hlo_of(out).encode(), level=1)
        return out

    def _compared(self, batch: Batch, signature: Signature) -> tuple[Out, str]:
        """Trace with the places in Python, and what differs from the first text of this signature."""
        torch_xla._XLAC._set_ir_debug(True)  # noted for every operation, which is slow
        try:
            out = self.function(batch)
            now = hlo_of(out)
        finally:
            torch_xla._XLAC._set_ir_debug(False)
        return out, changed_values(zlib.decompress(self._texts[signature]).decode(), now)

    def _tell(self, batch: Batch, signature: Signature) -> None:
        """Say once that the program was compiled again; with `warn` the next call says which value it was."""
        self._is_told = True
        text = (
            f"{self.name} was compiled again at its call {self._num_calls} though its inputs are as before "
            f"({signature_text(signature)}), so a value that Python computes is part of the program and has changed; "
            "make it a tensor of the batch or of the device"
        )
        self.compiles.complain(text, explain=lambda: self._compared(batch, signature)[1])


def hlo_of(out: Any) -> str:
    """The text of the program that is pending for these outputs."""
    leaves = tree_flatten(vars(out) if hasattr(out, "__dataclass_fields__") else out)[0]
    return str(torch_xla._XLAC._get_xla_tensors_hlo([leaf for leaf in leaves if isinstance(leaf, Tensor)]))


def num_compiles() -> int:
    """Programs compiled in this process so far."""
    data = met.metric_data("CompileTime")
    return int(data[0]) if data else 0


def _compile_seconds() -> float:
    data = met.metric_data("CompileTime")
    return float(data[1]) / 1e9 if data else 0.0  # the metric counts nanoseconds
